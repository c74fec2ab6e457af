"""The servers that `probe round` starts: plain decoding, and one for each number of draft steps and accept length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_bw.errors import ProbeError
from sglang_bw.launch import command as commands
from sglang_bw.launch import remote_code
from sglang_bw.launch.command import Command
from sglang_bw.recipes.flags import Flag, Flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe, Speculation

# The mean is exact and a round's length is the nearest whole numbers; the older default is biased near the ends.
_METHOD = "match-expected"
_NEVER = 100_000


@dataclass(frozen=True)
class Setup:
    """One server.

    :ivar steps: draft steps; ``None`` for a server without speculation, 0 for speculation that is switched off.
    :ivar accept_length: what is simulated.
    :ivar files: what has to be written before the start, JSON by path.
    """

    steps: int | None
    accept_length: float
    flags: Flags
    env: Mapping[str, str]
    files: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name for people."""
        if self.steps is None:
            return "plain decoding"
        return f"{self.steps} steps, accept length {self.accept_length:g} (simulated)"

    def command(
        self, recipe: Recipe, machine: Hardware, environ: Mapping[str, str], port: int, extra: Flags
    ) -> Command:
        """Return its launch: the recipe, the user's flags, and what this setup needs."""
        built = commands.build(
            recipe, machine, environ, port=port, speculate=self.steps is not None, extra=(*extra, *self.flags)
        )
        return remote_code.with_records(replace(built, env={**built.env, **self.env}))


def setups(
    recipe: Recipe, steps: tuple[int, ...], lengths: tuple[float, ...], folder: Path, *, goodput: bool
) -> list[Setup]:
    """Return the servers in the order of their starts.

    :param steps: draft steps to measure; empty for 0 and the recipe's own.
    :param lengths: accept lengths, each for the steps that can reach it; empty for 1, the middle and all accepted.
    :param folder: where the configuration of the off state will be written.
    :param goodput: whether the engine has the policy whose off state is plain decoding.
    :raises ProbeError: the recipe does not speculate, or something is impossible.
    """
    if recipe.spec is None:
        raise ProbeError(f"the recipe {recipe.id} does not speculate", hint="a recipe with spec, or --draft PATH|ID.")
    spec = recipe.spec
    wanted = steps or ((0, spec.steps) if spec.topk == 1 else (spec.steps,))
    if spec.topk > 1 and set(wanted) != {spec.steps}:
        raise ProbeError(
            f"the recipe drafts a tree (topk {spec.topk}): only its own {spec.steps} steps can be measured",
            hint="--steps goes with topk 1.",
        )
    for length in lengths:
        if not 1 <= length <= max(wanted) + 1:
            raise ProbeError(
                f"an accept length of {length:g} is impossible with {max(wanted)} draft steps",
                hint=f"from 1 to {max(wanted) + 1}.",
            )
    found = [Setup(None, 1.0, (), {})]
    for count in wanted:
        found += _off(spec, folder, goodput) if count == 0 else _rounds(spec, count, lengths)
    return found


def _rounds(spec: Speculation, steps: int, lengths: tuple[float, ...]) -> list[Setup]:
    chosen = [length for length in lengths or (1.0, (steps + 2) / 2, steps + 1.0) if length <= steps + 1]
    if not chosen:
        raise ProbeError(
            f"none of the accept lengths is possible with {steps} draft steps", hint=f"from 1 to {steps + 1}."
        )
    tokens = steps + 1 if spec.topk == 1 else spec.draft_tokens
    flags = (
        Flag("speculative-num-steps", (str(steps),)),
        Flag("speculative-num-draft-tokens", (str(tokens),)),
    )
    return [Setup(steps, length, flags, _simulated(spec, length)) for length in chosen]


def _off(spec: Speculation, folder: Path, goodput: bool) -> list[Setup]:
    path = folder / f"adaptive-off-{spec.steps}.json"  # what is in it depends on nothing else
    # The engine wants its own number of steps among the candidates: at a batch that never comes.
    tiers = {"1": [0], str(_NEVER): [spec.steps]}
    config = {batch: {"candidate_steps": steps} for batch, steps in tiers.items()}
    flags = [Flag("speculative-adaptive"), Flag("speculative-adaptive-config", (str(path),))]
    if goodput:
        flags.append(Flag("speculative-adaptive-policy", ("goodput",)))
    return [Setup(0, 1.0, tuple(flags), _simulated(spec, 1.0), {path: config})]


def _simulated(spec: Speculation, length: float) -> dict[str, str]:
    # The engine's other mode fills the context with one token, and the experts of an MoE with it.
    mode = "real-draft-token" if spec.topk == 1 else "fixed"
    return {
        "SGLANG_SIMULATE_ACC_LEN": f"{length:g}",
        "SGLANG_SIMULATE_ACC_METHOD": _METHOD,
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": mode,
    }
