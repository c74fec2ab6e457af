"""The two sides of a comparison: started here or only named, and checked to be what they are said to be."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from sglang_bw.errors import ArmError, GpuSelectionError, LoadError
from sglang_bw.experiment import served
from sglang_bw.experiment.client import StreamFailedError
from sglang_bw.experiment.gpu import GpuSampler
from sglang_bw.experiment.graphs import graph_share
from sglang_bw.experiment.served import Info
from sglang_bw.host import nvml
from sglang_bw.launch import device as devices
from sglang_bw.launch import port as ports
from sglang_bw.launch import preflight, secret
from sglang_bw.launch import server as servers
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.journal import launch_digest
from sglang_bw.launch.process import SignalRelay
from sglang_bw.launch.server import Server
from sglang_bw.launch.startup import Phase, Startup
from sglang_bw.ledger.record import ArmRecord, EngineRecord
from sglang_bw.recipes import chain, flags

Name = Literal["A", "B"]
OnStart = Callable[[str, Startup, list[Phase]], None]

_ASK_S = 30.0
_FLUSH_TRIES = 20
_STOP_S = 20.0
_SPECULATION = (chain.STEPS, chain.TOPK, chain.DRAFT_TOKENS)


@dataclass(frozen=True)
class ArmPlan:
    """What an arm is meant to be.

    :ivar says: in words, for people.
    :ivar command: how it is started; ``None`` for a server that runs already.
    :ivar asked: engine flags that were set for this arm alone, and that the server must confirm.
    :ivar recipe: id of what is started.
    """

    name: Name
    says: str
    url: str
    command: Command | None = None
    asked: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    recipe: str | None = None


class Arm:
    """An arm that answers.

    :ivar record: what it turned out to be.
    :ivar adapts: its policy says what it believes, so it is asked from time to time.
    :ivar gpus: UUIDs of those that it has; ``None`` when nobody knows.
    """

    def __init__(self, plan: ArmPlan, engine: Engine | None, server: Server | None = None) -> None:
        """Ask the server what it is, and compare.

        :raises ArmError: it is something else; lists every finding.
        :raises LoadError: it does not answer.
        """
        self.plan = plan
        self.server = server
        info = _info(plan)
        self.record = _identify(plan, engine, info)
        self.adapts = served.look(info, 0.0) is not None
        self.gpus = _gpus(plan.command, environment(plan.command, engine)) if plan.command and engine else None

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.plan.url

    def flush(self) -> None:
        """Empty the prefix cache; the engine refuses while it still works on something, so ask again.

        :raises LoadError: it does not, or not within ten seconds.
        """
        for _ in range(_FLUSH_TRIES):
            if _ask(self.plan, "POST", "/flush_cache").status_code == httpx.codes.OK:
                return
            time.sleep(0.5)
        raise LoadError(
            f"{self.url} does not flush its prefix cache",
            hint="Something else uses the server; or pass --no-flush, and prompts are found in the cache.",
        )

    @contextlib.contextmanager
    def observed(self) -> Iterator[Observation]:
        """Watch GPUs and the engine's log while a block runs; the result is filled at the end."""
        log = self.server.process.log if self.server else None
        begin = log.stat().st_size if log else 0
        found = Observation()
        with GpuSampler(self.gpus, local=is_local(self.url)) as sampler:
            yield found
        found.gpu = sampler.use()
        found.graph_share = graph_share(log, begin) if log else None

    def why_it_ended(self) -> str | None:
        """Return why a started engine is gone; ``None`` while it runs, and for a server that was only named."""
        if self.server is None or self.server.process.wait(2.0) is None:
            return None
        return f"the engine of arm {self.plan.name} ended: {self.server.death()} (log: {self.server.process.log})"


def stop(arms: Iterable[Arm]) -> None:
    """End what was started here, all arms at the same time."""
    running = [arm.server.process for arm in arms if arm.server and arm.server.process.poll() is None]
    for process in running:
        process.send(signal.SIGTERM)
    for process in running:
        if process.wait(_STOP_S) is None:
            process.kill()
            process.wait()


@dataclass
class Observation:
    """What was seen beside the requests."""

    gpu: Any = None
    graph_share: float | None = None


def start(plan: ArmPlan, engine: Engine, log: Path, timeout_s: float, on_start: OnStart) -> Arm:
    """Start an arm's engine, wait until it answers, check it.

    :raises EngineStartError: it died, or was not ready in time.
    :raises PortInUseError: somebody else listens there.
    :raises ArmError: it is not what it is meant to be; it is stopped then.
    """
    command = plan.command
    if command is None:
        return Arm(plan, engine)
    ports.check_free(command.host, command.port)
    environ = environment(command, engine)
    # The relay is not entered: Ctrl-C is this program's, which then ends the engine in its own way.
    server = servers.start(command, engine.python, environ, log, SignalRelay())
    try:
        server.await_ready(timeout_s, lambda startup, begun: on_start(plan.name, startup, begun))
        return Arm(plan, engine, server)
    except BaseException:
        server.process.kill()
        server.process.wait()
        raise


def environment(command: Command, engine: Engine) -> dict[str, str]:
    """Return the environment that an engine gets: the user's own, and what the launch sets."""
    return devices.environment(command.device, {**engine.environment(), **command.env})


def _gpus(command: Command, environ: Mapping[str, str]) -> list[str] | None:
    if command.device == "cpu":
        return []
    try:
        boards = preflight.used(command, nvml.read(nvml.load()), environ)
    except GpuSelectionError:
        return None
    return [board.uuid for board in boards] or None


def difference(a: ArmRecord, b: ArmRecord) -> dict[str, tuple[Any, Any]]:
    """Return what is not configured the same: key -> (A, B)."""
    keys = sorted({*a.config, *b.config})
    return {key: (a.config.get(key), b.config.get(key)) for key in keys if a.config.get(key) != b.config.get(key)}


def is_local(url: str) -> bool:
    """Tell whether a server runs on this machine."""
    return httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")


def _identify(plan: ArmPlan, engine: Engine | None, info: Info) -> ArmRecord:
    hint = f"{plan.url}/server_info has the whole configuration."
    if findings := _findings(plan, engine, info):
        raise ArmError(
            "\n".join([f"arm {plan.name} ({plan.says}) is not what it is meant to be:", *findings]), hint=hint
        )
    try:
        return _described(plan, engine, info)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ArmError(f"arm {plan.name} says of itself what SGLang does not say: {error}", hint=hint) from error


def _described(plan: ArmPlan, engine: Engine | None, info: Info) -> ArmRecord:
    return planned(plan, engine).model_copy(
        update={
            "engine": _engine_record(engine if plan.command else None, str(info.get("version", "unknown"))),
            "speculation": served.speculation(info),
            "kv_tokens": served.kv_tokens(info),
            "graphs": served.graphs(info),
            "memory": served.memory(info),
            "config": served.config(info),
        }
    )


def planned(plan: ArmPlan, engine: Engine | None) -> ArmRecord:
    """Return what is known of an arm before it answers."""
    command = plan.command
    return ArmRecord(
        name=plan.name,
        says=plan.says,
        recipe=plan.recipe,
        launch=launch_digest(engine.installation, command) if command and engine else None,
        url=secret.without_userinfo(plan.url),
        argv=tuple(flags.tokens(command.shown_flags)) if command else (),
        env=dict(command.shown_env) if command else {},
        engine=_engine_record(engine if command else None, engine.installation.version if engine else "unknown"),
    )


def _info(plan: ArmPlan) -> Info:
    for path in served.PATHS:
        response = _ask(plan, "GET", path)
        if response.status_code == httpx.codes.OK:
            with contextlib.suppress(ValueError, RecursionError):
                info = response.json()
                if isinstance(info, dict):
                    return info
    raise ArmError(
        f"{plan.url} does not say what it is ({response.status_code} on /server_info)",
        hint="Is it an SGLang server? A server with a key needs --api-key-file or SGLANG_BW_API_KEY.",
    )


def _ask(plan: ArmPlan, method: str, path: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    try:
        return httpx.request(method, plan.url + path, headers=headers, timeout=_ASK_S, verify=False, trust_env=False)
    except httpx.TimeoutException as error:
        raise StreamFailedError(
            "timeout",
            f"arm {plan.name} said nothing for {_ASK_S:.0f} s at {plan.url}{path}",
            hint="It hangs; its log says at what.",
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LoadError(
            f"arm {plan.name} does not answer at {plan.url}: {error}",
            hint="Is the server up, and the address right? `sglang-bw serve` prints it.",
        ) from error


def _findings(plan: ArmPlan, engine: Engine | None, info: Info) -> list[str]:
    found = []
    wanted = dict(plan.asked)
    if plan.command:
        speculates = bool(info.get("speculative_algorithm"))
        if speculates != plan.command.speculates:
            found.append(f"  it {'speculates' if speculates else 'does not speculate'}")
        wanted |= {flag: flags.value(plan.command.flags, flag) or "" for flag in _SPECULATION}
        version = engine.installation.version if engine else None
        if version and str(info.get("version")) != version:
            found.append(f"  the engine is {info.get('version')}, not {version}")
    for flag, value in wanted.items():
        key = flag.replace("-", "_")
        if value and key in info and _plain(info[key]) != _plain(value):
            found.append(f"  {key} is {info[key]!r}, not {value!r}")
    return found


def _plain(value: Any) -> str:
    """Return a value as a flag would have it; a number reads the same as 0.8 and as 0.80."""
    text = str(value).strip().lower()
    try:
        return repr(float(text))
    except ValueError:
        return {"none": "", "null": ""}.get(text, text)


def _engine_record(engine: Engine | None, version: str) -> EngineRecord:
    if engine is None:
        return EngineRecord(version=version, series=version.partition("+")[2] or None)
    found = engine.installation
    patches = tuple(patch.file for patch in found.patches)
    return EngineRecord(version=version, series=found.series or None, tree=found.tree or None, patches=patches)
