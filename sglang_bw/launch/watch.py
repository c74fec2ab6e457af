"""What a running server is doing now, from whatever it tells: metrics when they are on, else its load report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sglang_bw.errors import WatchError
from sglang_bw.launch import secret

METRICS_FLAG = "--enable-metrics"
TIMEOUT_S = 10.0
_PREFIX = "sglang:"


@dataclass(frozen=True)
class Served:
    """What does not change while a server runs.

    :ivar algorithm: of the speculation; ``None`` without.
    :ivar steps: draft steps that it was started with.
    :ivar adaptive: whether a policy chooses the steps.
    :ivar has_metrics: whether ``/metrics`` answers.
    """

    model: str
    version: str
    algorithm: str | None
    steps: int | None
    draft_tokens: int | None
    adaptive: bool
    has_metrics: bool


@dataclass(frozen=True)
class Reading:
    """One look at a server; ``None`` is what it does not tell.

    :ivar at: monotonic clock, seconds.
    :ivar tok_s: output tokens per second, over the engine's own last stretch of decode steps.
    :ivar accept_length: tokens that a verify pass emits, the bonus token included: of late with metrics, else over the
        server's whole life (``accept_is_recent``).
    :ivar steps: draft steps chosen now.
    :ivar kv_use: share of the KV pool in use.
    """

    at: float
    running: int | None = None
    queued: int | None = None
    kv_use: float | None = None
    tok_s: float | None = None
    accept_length: float | None = None
    accept_is_recent: bool = False
    steps: float | None = None


class Watcher:
    """Asks one server again and again."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Prepare to watch the server at ``url``, without a path."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._client = httpx.Client(
                base_url=url, headers=headers, timeout=TIMEOUT_S, verify=False, trust_env=False, follow_redirects=True
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise WatchError(
                f"{secret.without_userinfo(url)!r} is no address: {error}",
                hint="For example --url http://127.0.0.1:30000.",
            ) from error
        self.url = secret.without_userinfo(url)  # to be shown; the client has the whole
        self.served: Served | None = None

    def connect(self) -> Served:
        """Find out what is served.

        :raises WatchError: nothing answers there, or something that is no SGLang server.
        """
        info = self._json("/server_info")
        if "model_path" not in info and "internal_states" not in info:
            raise self._not_sglang("/server_info has no model_path")
        steps, tokens = info.get("speculative_num_steps"), info.get("speculative_num_draft_tokens")
        self.served = Served(
            model=str(info.get("served_model_name") or info.get("model_path")),
            version=str(info.get("version") or "?"),
            algorithm=str(info["speculative_algorithm"]) if info.get("speculative_algorithm") else None,
            steps=_whole(_number(steps)),
            draft_tokens=_whole(_number(tokens)),
            adaptive=bool(info.get("speculative_adaptive")),
            has_metrics=self._metrics() is not None,
        )
        return self.served

    def read(self) -> Reading:
        """Look once.

        :raises WatchError: the server does not answer.
        """
        served = self.served or self.connect()
        values = self._metrics() if served.has_metrics else None
        now = time.monotonic()
        return _of_metrics(values, now) if values is not None else self._of_loads(now)

    def _of_loads(self, now: float) -> Reading:
        try:
            ranks = _objects(self._json("/v1/loads").get("loads"))
        except WatchError:
            if not self._json("/health", parse=False):
                raise
            ranks = []  # an engine from before this report
        if not ranks:
            return Reading(now, tok_s=self._last_throughput())
        spec = [rank["speculative"] for rank in ranks if isinstance(rank.get("speculative"), dict)]
        lengths = _numbers(spec, "accept_length")
        return Reading(
            at=now,
            running=_whole(sum(_numbers(ranks, "num_running_reqs"))),
            queued=_whole(sum(_numbers(ranks, "num_waiting_reqs"))),
            kv_use=max(_numbers(ranks, "token_usage"), default=None),
            # The report's own speed stays 0 while metrics are off.
            tok_s=sum(_numbers(ranks, "gen_throughput")) or self._last_throughput(),
            accept_length=sum(lengths) / len(lengths) if lengths else None,
        )

    def _last_throughput(self) -> float | None:
        states = self._json("/server_info").get("internal_states")
        known = _numbers(_objects(states), "last_gen_throughput")
        return sum(known) if known else None

    def _metrics(self) -> dict[str, float] | None:
        """Return SGLang's metrics summed over ranks and models; ``None`` when they are off."""
        try:
            response = self._client.get("/metrics")
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        if response.status_code != httpx.codes.OK or _PREFIX not in response.text:
            return None
        return _summed(response.text)

    def _json(self, path: str, *, parse: bool = True) -> dict[str, Any]:
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise WatchError(f"the server at {self.url} wants a key", hint="--api-key-file FILE, or SGLANG_BW_API_KEY.")
        if response.status_code != httpx.codes.OK:
            raise self._not_sglang(f"{path} answers {response.status_code}")
        if not parse:
            return {"ok": True}
        try:
            found = response.json()
        except (ValueError, RecursionError) as error:
            raise self._not_sglang(f"{path} is no JSON") from error
        if not isinstance(found, dict):
            raise self._not_sglang(f"{path} is no object")
        return found

    def _silent(self, error: Exception) -> WatchError:
        return WatchError(
            f"no server answers at {self.url}: {error or type(error).__name__}",
            hint="`sglang-bw serve RECIPE` starts one; --url watches another.",
        )

    def _not_sglang(self, why: str) -> WatchError:
        return WatchError(f"{self.url} is no SGLang server: {why}", hint="--url http://HOST:PORT of one.")


def _summed(text: str) -> dict[str, float]:
    """Return name without prefix -> value; gauges of means and shares are averaged over ranks, all else is summed."""
    found: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(_PREFIX) and "le" not in sample.labels:
                    found.setdefault(sample.name.removeprefix(_PREFIX), []).append(sample.value)
    except ValueError:  # cut off in the middle
        return {}
    return {name: sum(values) / len(values) if _is_mean(name) else sum(values) for name, values in found.items()}


def _is_mean(name: str) -> bool:
    return (name.startswith("spec_") and not name.endswith("_total")) or name.endswith("_usage")


def _of_metrics(values: Mapping[str, float], now: float) -> Reading:
    return Reading(
        at=now,
        running=_whole(values.get("num_running_reqs")),
        queued=_whole(values.get("num_queue_reqs")),
        kv_use=values.get("token_usage"),
        # The counters of tokens move when a request ends; this gauge moves while it decodes.
        tok_s=values.get("gen_throughput"),
        accept_length=values.get("spec_accept_length") or None,
        accept_is_recent=True,
        steps=values.get("spec_num_steps"),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)


def _number(said: Any) -> float | None:
    """Return a number that a server says; ``None`` for anything else, "auto" for one."""
    try:
        number = float(said)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _numbers(parts: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [number for part in parts if (number := _number(part.get(key))) is not None]


def _objects(said: Any) -> list[dict[str, Any]]:
    return [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
