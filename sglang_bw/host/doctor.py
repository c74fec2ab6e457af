"""The examination of a host: every check in its order, and what came of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_bw.errors import BwError, DoctorError, DoctorWarningError
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.verify import PACKAGE, Installation, inspect_environment
from sglang_bw.host import binaries, drivers, engines, fabric, health, limits, link_load, nccl, nvml, toolchain
from sglang_bw.host.fabric import Fabric
from sglang_bw.host.finding import Finding, Verdict
from sglang_bw.host.link_load import UnderLoad
from sglang_bw.host.nvml import Library
from sglang_bw.host.system import System

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """What was found, in the order of the checks."""

    system: System
    installation: Installation
    between: Fabric
    findings: tuple[Finding, ...]

    def of(self, verdict: Verdict) -> list[Finding]:
        """Return the findings of one verdict."""
        return [finding for finding in self.findings if finding.verdict is verdict]

    @property
    def worst(self) -> Verdict:
        """``fail`` or ``warn`` when there is one, else ``ok``."""
        return next((v for v in (Verdict.FAIL, Verdict.WARN) if self.of(v)), Verdict.OK)

    def error(self, *, strict: bool = False) -> BwError | None:
        """Return the error that the findings make.

        :param strict: warnings count too.
        """
        failed, warned = self.of(Verdict.FAIL), self.of(Verdict.WARN)
        if failed:
            return DoctorError(_sentence(failed, "keeps a server from working", "keep a server from working"))
        if warned and strict:
            return DoctorWarningError(_sentence(warned, "is a warning", "are warnings"))
        return None

    def as_json(self) -> dict[str, Any]:
        """Return findings and the facts behind them, for programs."""
        gpus = self.between.gpus
        return {
            "verdict": self.worst.value,
            "counts": {verdict.value: len(self.of(verdict)) for verdict in Verdict},
            "findings": [finding.as_json() for finding in self.findings],
            "machine": {
                "kernel": platform.release(),
                "machine": platform.machine(),
                "container": self.system.in_container,
                "virtual": self.system.is_virtual,
                "root": os.geteuid() == 0,
            },
            "engine": {key: self.installation.as_json()[key] for key in ("state", "version", "location", "python")},
            "driver": gpus.driver,
            "cuda": ".".join(map(str, gpus.cuda)),
            "gpus": [asdict(gpu) for gpu in gpus.boards],
            "pairs": [pair._asdict() for pair in self.between.pairs],
            "topology": self.between.matrix() if gpus.boards else [],
            "variables": [
                {"name": variable.name, "does": variable.does, "value": self.system.environ.get(variable.name)}
                for variable in nccl.VARIABLES
            ],
        }


def _sentence(findings: list[Finding], one: str, many: str) -> str:
    names = ", ".join(dict.fromkeys(f"{finding.group}: {finding.name}" for finding in findings))
    return f"{len(findings)} finding{'s' if len(findings) > 1 else ''} {many if len(findings) > 1 else one} ({names})"


def examine(
    system: System,
    library: Library | None,
    *,
    python: Path | None = None,
    gpus: str = "",
    load: bool = True,
    tell: Tell = lambda _line: None,
) -> Diagnosis:
    """Look at everything that a server will need.

    :param library: the driver's binding, ``None`` when it is not installed.
    :param python: interpreter of the environment with the engine, this one by default.
    :param gpus: the GPUs meant, as :meth:`Gpus.only` reads them; empty for all.
    :param load: copy something to each idle GPU, to see its link at work.
    :param tell: is called with what is being looked at.
    :raises RefusedError: there is no such interpreter.
    :raises GpuSelectionError: a GPU that was asked for is not here.
    """
    tell("asking the driver")
    chosen = nvml.read(library).only(gpus)
    tell("reading the engine's environment")
    environment = Environment.probe(python)
    installation = inspect_environment(environment, safe_path=True)
    between = fabric.fabric(system, chosen)
    return Diagnosis(
        system,
        installation,
        between,
        tuple(_findings(system, environment, installation, between, load=load, tell=tell)),
    )


def _findings(
    system: System, environment: Environment, installation: Installation, between: Fabric, *, load: bool, tell: Tell
) -> Iterator[Finding]:
    gpus = between.gpus
    yield from engines.findings(environment, installation)
    tell("reading the architectures of compiled kernels")
    yield from binaries.findings(environment, gpus.boards, binaries.requirements(environment, PACKAGE))
    yield from drivers.findings(system, gpus, environment.installed)
    yield from health.findings(gpus, _loaded(between, tell) if load else {})
    tell("reading the bus")
    yield from fabric.findings(system, between)
    yield from limits.findings(system, gpus)
    yield from nccl.findings(system, environment.installed, between)
    tell("asking the compilers")
    yield from toolchain.findings(system, environment, gpus.boards)


def _loaded(between: Fabric, tell: Tell) -> dict[int, UnderLoad]:
    """Put the idle links to work, one after the other: a GPU that somebody uses is left alone."""
    seen = {}
    for gpu in between.gpus.boards:
        if not gpu.processes and not gpu.busy and not health.is_held(gpu) and not gpu.mig:
            tell(f"copying to GPU {gpu.index}, to see its link at work")
            seen[gpu.index] = link_load.measure(gpu.uuid)
    return seen
