"""Which messages a recipe's all-reduces have: rows of the hidden size, in decode steps and in verify passes."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_bw.errors import CheckpointError, PlanInputError, ProbeError
from sglang_bw.launch.command import Command
from sglang_bw.plan import models
from sglang_bw.recipes import flags
from sglang_bw.recipes.schema import Weights

_MOST_BATCH = 64
_BATCH_LIMITS = ("cuda-graph-max-bs-decode", "cuda-graph-max-bs", "max-running-requests")


@dataclass(frozen=True)
class Sizes:
    """What is reduced.

    :ivar gpus: of one tensor-parallel group.
    :ivar hidden: numbers in a row.
    :ivar batches: requests in a decode step.
    :ivar draft_tokens: rows of one request in a verify pass; 1 without speculation.
    """

    gpus: int
    hidden: int
    batches: tuple[int, ...]
    draft_tokens: int = 1

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the messages, decode and verify, each once."""
        return tuple(sorted({rows for batch in self.batches for rows in (batch, batch * self.draft_tokens)}))

    def of(self, rows: int) -> str:
        """Return which passes have messages of so many rows: ``decode 4, verify 1``."""
        passes = [f"decode {rows}"] if rows in self.batches else []
        if self.draft_tokens > 1 and rows % self.draft_tokens == 0 and rows // self.draft_tokens in self.batches:
            passes.append(f"verify {rows // self.draft_tokens}")
        return ", ".join(passes)


def of_command(
    command: Command, weights: Weights | None = None, *, hidden: int | None = None, gpus: int | None = None
) -> Sizes:
    """Return the sizes of a launch.

    :param weights: what its recipe says of the target, which may be all that is known here.
    :param hidden: in place of the model's.
    :param gpus: in place of the launch's tensor parallelism.
    :raises ProbeError: nobody knows the hidden size.
    """
    return Sizes(
        gpus=gpus or number(command, "tp-size") or 1,
        hidden=hidden or _hidden(command, weights),
        batches=batches(command),
        draft_tokens=(number(command, "speculative-num-draft-tokens") or 1) if command.speculates else 1,
    )


def batches(command: Command) -> tuple[int, ...]:
    """Return powers of two up to what the launch captures graphs for, at most 64, and that bound itself."""
    limits = [limit for name in _BATCH_LIMITS if (limit := number(command, name))]
    most = min([*limits, _MOST_BATCH])
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return tuple(sorted({*powers, most}))


def number(command: Command, name: str) -> int | None:
    """Return a flag's whole number, ``None`` where it is not set or no number."""
    text = flags.value(command.flags, name) or ""
    return int(text) if text.isascii() and text.isdigit() else None


def _hidden(command: Command, weights: Weights | None) -> int:
    try:
        return models.shape(command.target, weights).hidden
    except (CheckpointError, PlanInputError) as error:
        raise ProbeError(
            f"the hidden size of {command.target} is not known: {error.message}",
            hint="name it: --hidden N (hidden_size of its config.json).",
        ) from error
