"""One block: every prompt once, a fixed number at a time, and a look at whether the client keeps up."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sglang_bw.experiment import client, looks, served
from sglang_bw.experiment.client import Sampling
from sglang_bw.experiment.prompts import Prompt
from sglang_bw.experiment.quantiles import Quantiles, quantiles
from sglang_bw.ledger.record import PolicyLook, RequestRow

TICK_S = 0.01
TOO_LATE_S = 0.001
TOO_BUSY = 0.9

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Measured:
    """What a block brought.

    :ivar rows: in the order of the prompts.
    :ivar seconds: from the first request to the end of the last.
    :ivar spread_s: quantiles of every gap between arrivals, seconds.
    :ivar lag_s: median lateness of a timer of this event loop: what the client adds to every token.
    :ivar cpu: share of one core that the client used.
    :ivar kv_use: largest share of the KV pool that the server reported.
    :ivar policy: what its adaptive policy believed, from time to time.
    """

    rows: tuple[RequestRow, ...]
    seconds: float
    spread_s: Quantiles | None
    lag_s: float
    cpu: float
    kv_use: float | None
    policy: tuple[PolicyLook, ...] = ()


def is_slow(lag_s: float, cpu: float) -> bool:
    """Tell whether the client, and not the server, may have set the speed."""
    return lag_s > TOO_LATE_S or cpu > TOO_BUSY


def run_block(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    *,
    api_key: str | None = None,
    on_done: Progress | None = None,
    adapts: bool = False,
) -> Measured:
    """Ask every prompt once, in order, with ``concurrency`` requests open.

    :param on_done: called with the number of answered requests.
    :param adapts: ask the server's policy every half second what it believes.
    :raises StreamFailedError: a request failed; the others are given up.
    :raises PromptsError: a prompt does not fit the context.
    """
    return asyncio.run(_block(url, prompts, sampling, concurrency, api_key, on_done, adapts))


async def _block(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    api_key: str | None,
    on_done: Progress | None,
    adapts: bool,
) -> Measured:
    rows: dict[int, RequestRow] = {}
    gaps: list[float] = []
    waiting = iter(enumerate(prompts))
    async with client.connect(sampling.timeout_s, api_key) as session:
        began, cpu = time.perf_counter(), time.process_time()
        watch = _Watch(session, url, began)

        async def work() -> None:
            for number, prompt in waiting:
                rows[number], found = await client.ask(session, url, prompt, sampling, began)
                gaps.extend(found)
                if on_done:
                    on_done(len(rows))

        try:
            async with asyncio.TaskGroup() as group:
                beside = [watch.ticks(), watch.loads(), *([watch.policy()] if adapts else [])]
                watchers = [group.create_task(look) for look in beside]
                workers = [group.create_task(work()) for _ in range(concurrency)]
                await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
                for task in watchers:
                    task.cancel()
        except ExceptionGroup as group_error:  # the first failure ends the block; the rest are its consequences
            raise group_error.exceptions[0] from None
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
    return Measured(
        rows=tuple(rows[number] for number in range(len(prompts))),
        seconds=seconds,
        spread_s=quantiles(gaps) if gaps else None,
        lag_s=statistics.median(watch.late) if watch.late else 0.0,
        cpu=used / seconds,
        kv_use=max(watch.kv_use, default=None),
        policy=tuple(watch.looks),
    )


class _Watch:
    """What goes on beside the requests: the loop's own lateness, the KV pool, and what an adaptive policy believes."""

    def __init__(self, session: aiohttp.ClientSession, url: str, began: float) -> None:
        self.session = session
        self.url = url
        self.began = began
        self.late: list[float] = []
        self.kv_use: list[float] = []
        self.looks: list[PolicyLook] = []

    async def ticks(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late.append(max(0.0, time.perf_counter() - due))

    async def loads(self) -> None:
        """Ask the engine for its load; one that does not know the question is asked once."""
        for pause in looks.pauses():
            if not (ranks := (await self._json("/v1/loads") or {}).get("loads")):
                return
            try:
                self.kv_use += [float(rank["token_usage"]) for rank in ranks]
            except (ValueError, LookupError, TypeError):
                return
            await asyncio.sleep(pause)

    async def policy(self) -> None:
        """Ask what the policy believes, until it stops to answer."""
        while info := await self._json(served.PATHS[0]):
            if look := served.look(info, time.perf_counter() - self.began):
                self.looks.append(look)
            await asyncio.sleep(looks.EVERY_S)

    async def _json(self, path: str) -> dict[str, Any] | None:
        """Return the answer to a question that is no part of the measurement; ``None`` when there is none."""
        try:
            async with self.session.get(self.url + path) as response:
                answer = await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None
