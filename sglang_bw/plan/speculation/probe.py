"""Results of ``sglang-bw probe``, in the form that a plan reads.

``probe round``: ``{"probe": "round", "context": 0, "plain": [{"batch": 1, "seconds": 0.011}], "rounds": [{"batch": 1,
"steps": 3, "seconds": 0.03}]}``. ``probe allreduce``: ``{"probe": "allreduce", "latencies": [{"bytes": 14336,
"microseconds": 27.0, "backend": "nccl"}]}``. What else there is says whether they hold for a launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation.allreduce import AllReduce
from sglang_bw.plan.speculation.cost import Ratio
from sglang_bw.plan.speculation.tables import parameters
from sglang_bw.recipes.origin import Origin

# The engine sets these itself where nobody else does.
_OF_THE_ENGINE = {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"}
# They change what is written, not what is done.
_LOGS = {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}
_MAKE_ONE = "run `sglang-bw probe round` or `sglang-bw probe allreduce` with --json"

Model = TypeVar("Model", bound=BaseModel)


class _Plain(BaseModel):
    batch: int = Field(ge=1)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class _Round(_Plain):
    steps: int = Field(ge=0)
    straight: bool | None = None


class _Host(BaseModel):
    key: str = ""


class _Rounds(BaseModel):
    context: int = Field(default=0, ge=0)
    plain: list[_Plain] = Field(min_length=1)
    rounds: list[_Round] = Field(min_length=1)
    complete: bool = True
    recipe: str = ""
    engine: str = ""
    device: str = ""
    launch: dict[str, str] = {}
    host: _Host = _Host()

    @property
    def origin(self) -> Origin:
        return Origin(self.host.key, self.recipe, self.engine, self.device, self.launch)


class _Latency(BaseModel):
    bytes: int = Field(ge=1)
    microseconds: float = Field(gt=0, allow_inf_nan=False)
    backend: str = "nccl"
    graph: bool | None = None


class _Latencies(BaseModel):
    """The fields behind the first are those of the command's own files; what somebody else wrote there is no error."""

    latencies: list[_Latency] = Field(min_length=1)
    gpus: object = None
    hidden: object = None
    device: object = None
    complete: object = None
    backends: object = None


@dataclass(frozen=True)
class Reduced:
    """What the all-reduces of a launch are.

    :ivar gpus: of one tensor-parallel group.
    :ivar env: variables of NCCL that the launch has.
    """

    gpus: int
    hidden: int
    device: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class MeasuredCost:
    """R as it was measured on this host: T_round(k, batch) / T_dec(batch).

    :ivar context: tokens a request held while it was measured.
    :ivar plain: batch -> seconds of a plain decode step.
    :ivar rounds: (batch, draft steps) -> seconds of a round.
    """

    context: int
    plain: Mapping[int, float]
    rounds: Mapping[tuple[int, int], float]

    def ratio(self, context: int, concurrency: int, steps: int) -> Ratio:
        """Return R at a batch and number of steps that were measured; it says so when they were not."""
        plain, taken = self.plain.get(concurrency), self.rounds.get((concurrency, steps))
        if plain is None or taken is None:
            have = ", ".join(sorted({str(batch) for batch, count in self.rounds if count == steps}, key=int))
            reason = f"the probe has no round of {steps} steps at batch {concurrency}"
            return Ratio(None, 0.0, "round probe", reason + (f" (it has {have})" if have else ""))
        sigma = parameters().sigma["measured"]
        reason = ""
        if context > 2 * max(self.context, 2048):
            reason = f"the probe was taken at {self.context:,} tokens of context"
        return Ratio(taken / plain, sigma, "round probe", reason)


def round_cost(path: Path) -> MeasuredCost:
    """Read a result of ``probe round``.

    :raises SpeculationInputError: when it cannot be read or is not one.
    """
    found = _load(path, _Rounds)
    rounds = {(row.batch, row.steps): row.seconds for row in found.rounds}
    return MeasuredCost(found.context, {row.batch: row.seconds for row in found.plain}, rounds)


def doubt(path: Path, wanted: Origin) -> str:
    """Return why a result of ``probe round`` says little of a launch, in words; empty where it may be believed.

    :raises SpeculationInputError: when it cannot be read or is not one.
    """
    found = _load(path, _Rounds)
    said = [] if found.complete else ["it is not complete"]
    if any(row.straight is False for row in found.rounds):
        said.append("tokens per second were no straight line in the accept length")
    if other := found.origin.differs(wanted):
        said.append(f"it was measured with {other}")
    return "; ".join(said)


def allreduce(path: Path, *, calls: int, hidden: int, backend: str = "nccl") -> AllReduce:
    """Read a result of ``probe allreduce``.

    :param backend: which of the measured ones the engine will use.
    :raises SpeculationInputError: when it cannot be read, is not one, or does not have the backend.
    """
    found = _load(path, _Latencies)
    rows = [row for row in found.latencies if row.backend == backend]
    # Passes run in CUDA graphs, so where those were measured their times count.
    rows = [row for row in rows if row.graph] or rows
    if not rows:
        have = ", ".join(sorted({row.backend for row in found.latencies}))
        raise SpeculationInputError(f"{path} has no latencies of {backend}", hint=f"it has {have}")
    fastest: dict[int, float] = {}
    for row in rows:
        fastest[row.bytes] = min(fastest.get(row.bytes, math.inf), row.microseconds * 1e-6)
    return AllReduce(calls, hidden, tuple(sorted(fastest.items())))


def unlike(path: Path, launch: Reduced, backend: str = "nccl") -> str:
    """Return in what a result of ``probe allreduce`` was measured otherwise; a file that does not say it in nothing.

    :raises SpeculationInputError: it cannot be read or is not one.
    """
    found = _load(path, _Latencies)
    pairs = [
        (name, getattr(found, name), getattr(launch, name))
        for name in ("gpus", "hidden", "device")
        if getattr(found, name) is not None
    ]
    ways = found.backends if isinstance(found.backends, dict) else {}
    if isinstance(env := ways.get(backend), dict):
        names = sorted({*env, *launch.env} - _LOGS - (_OF_THE_ENGINE - launch.env.keys()))
        pairs += [(name, env.get(name, "unset"), launch.env.get(name, "unset")) for name in names]
    return ", ".join(f"{name} {here} in place of {there}" for name, here, there in pairs if here != there)


def check_stored(path: Path, launch: Reduced) -> None:
    """Check that a result of ``probe allreduce`` can stand for a launch that nobody has named it for.

    :raises SpeculationInputError: it cannot.
    """
    if _load(path, _Latencies).complete is not True:
        raise SpeculationInputError(f"{path} is not complete")
    if other := unlike(path, launch):
        raise SpeculationInputError(f"{path} was measured otherwise: {other}")
    allreduce(path, calls=1, hidden=launch.hidden)


def _load(path: Path, model: type[Model]) -> Model:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpeculationInputError(f"{path} cannot be read: {error.strerror or error}", hint=_MAKE_ONE) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SpeculationInputError(
            f"{path} is not a result of `sglang-bw probe`: {where}: {first['msg']}",
            hint=_MAKE_ONE,
        ) from error
