"""What a tuning searches: settings with their values, and the engine flags that a choice of them means."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_bw.errors import TuneError
from sglang_bw.recipes import chain
from sglang_bw.recipes import flags as engine_flags
from sglang_bw.recipes.flags import Flag, Flags

AS_IS = "as is"
OFF = "off"
STEPS = "steps"
_STEP_VALUES = ("1", "2", "3", "5", OFF)
_TREES = ("2", "4", "8")
_GRAPHS = (8, 16, 32, 64, 128)
_FRACTION_STEP = 0.02
_SPECULATIVE = "speculative-"

Choice = Mapping[str, str]


@dataclass(frozen=True)
class Setting:
    """One thing to vary.

    :ivar name: an engine flag without dashes; or ``steps``, which sets draft steps and draft tokens of a chain, and
        speculation itself with the value ``off``.
    :ivar values: the recipe's own, ``as is``, first.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """All combinations of settings."""

    settings: tuple[Setting, ...]

    @property
    def size(self) -> int:
        """Number of combinations, the recipe as it is among them."""
        size = 1
        for setting in self.settings:
            size *= len(setting.values)
        return size

    @property
    def as_is(self) -> dict[str, str]:
        """The recipe as it is."""
        return {setting.name: AS_IS for setting in self.settings}

    @property
    def digest(self) -> str:
        """The same for the same search."""
        content = [[setting.name, setting.values] for setting in self.settings]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:6]

    def neighbours(self) -> Iterator[dict[str, str]]:
        """Give the choices that differ from the recipe in one setting: what a search should know first."""
        for setting in self.settings:
            for value in setting.values[1:]:
                yield self.as_is | {setting.name: value}

    def choices(self) -> Iterator[dict[str, str]]:
        """Give every choice."""
        names = [setting.name for setting in self.settings]
        for values in itertools.product(*(setting.values for setting in self.settings)):
            yield dict(zip(names, values, strict=True))


def parse(text: str) -> Setting:
    """Read ``max-running-requests=4,8``.

    :raises TuneError: there is no name, or no value.
    """
    name, equals, values = text.strip().lstrip("-").partition("=")
    found = tuple(dict.fromkeys(value.strip() for value in values.split(",") if value.strip()))
    if not (name and equals and found):
        raise TuneError(f"{text!r} is no setting to search", hint="Write for example --space max-running-requests=4,8.")
    if name == STEPS and (wrong := [value for value in found if not _is_step_value(value)]):
        raise TuneError(
            f"{', '.join(wrong)}: no number of draft steps",
            hint=f"Numbers from 1 on, or {OFF}: --space steps=1,3,{OFF}.",
        )
    return Setting(engine_flags.ALIASES.get(name, name), (AS_IS, *(value for value in found if value != AS_IS)))


def usual(launch: Flags, *, has_gpus: bool) -> Space:
    """Return what is worth a look around a launch.

    Values that the launch has already are left out: they are the recipe as it is.
    """
    settings = [*_speculation(launch), _around("max-running-requests", launch, (0.5, 2))]
    if has_gpus:
        settings += [
            Setting("cuda-graph-max-bs-decode", tuple(map(str, _GRAPHS))),
            Setting("mem-fraction-static", _fractions(launch)),
            Setting("attention-backend", ("flashinfer", "triton", "trtllm_mla")),
            Setting("moe-runner-backend", ("triton", "flashinfer_cutlass", "flashinfer_trtllm")),
        ]
    found = []
    for setting in settings:
        own = engine_flags.value(launch, _flags(setting.name)[0])
        values = tuple(value for value in setting.values if value != own)
        if values:
            found.append(replace(setting, values=(AS_IS, *values)))
    return Space(tuple(found))


def flags_of(choice: Choice, launch: Flags) -> tuple[Flags, bool]:
    """Return the engine flags that a choice adds to a launch, and whether it speculates."""
    added: list[Flag] = []
    speculates = engine_flags.has(launch, "speculative-algorithm")
    for name, value in choice.items():
        if value == AS_IS:
            continue
        if name != STEPS:
            added += engine_flags.from_mapping({name: _typed(value)})
        elif value == OFF:
            speculates = False
        else:
            added += [Flag(chain.STEPS, (value,)), Flag(chain.DRAFT_TOKENS, (str(chain.draft_tokens(int(value))),))]
    added += chain.follow(engine_flags.merge(launch, tuple(added)), tuple(added))
    if not speculates:
        added = [flag for flag in added if not flag.name.startswith(_SPECULATIVE)]
    return tuple(added), speculates


def says(choice: Choice) -> str:
    """Return a choice in words."""
    return ", ".join(f"{name} {value}" for name, value in choice.items() if value != AS_IS) or AS_IS


def key(choice: Choice) -> str:
    """Return what two equal choices have in common."""
    return json.dumps(sorted((name, value) for name, value in choice.items() if value != AS_IS))


def check(space: Space, known: Sequence[str]) -> None:
    """Make sure that there is something to search.

    :param known: flags of the engine release; empty when they are not known.
    :raises TuneError: there is one choice only, a name that is no flag, or two settings of the same flag.
    """
    written = [flag for setting in space.settings for flag in _flags(setting.name)]
    if twice := sorted({flag for flag in written if written.count(flag) > 1}):
        raise TuneError(
            f"{', '.join(twice)}: set by more than one setting", hint="Write all values in one: --space steps=1,2,3."
        )
    if space.size < 2:
        raise TuneError("there is nothing to search", hint="Name settings: --space max-running-requests=4,8.")
    wrong = [one.name for one in space.settings if known and one.name != STEPS and one.name not in known]
    if wrong:
        raise TuneError(
            f"{', '.join(wrong)}: no flag of this engine", hint="Flags are written as for `serve`, without dashes."
        )


def _is_step_value(value: str) -> bool:
    return value in (AS_IS, OFF) or (value.isascii() and value.isdigit() and int(value[:9]) > 0)


def _typed(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value.lower(), value)


def _flags(name: str) -> tuple[str, ...]:
    """Return the flags that a setting writes, the one that it is about first."""
    return (chain.STEPS, chain.DRAFT_TOKENS) if name == STEPS else (name,)


def _speculation(launch: Flags) -> list[Setting]:
    if not engine_flags.has(launch, "speculative-algorithm"):
        return []
    if engine_flags.value(launch, chain.TOPK, "1") == "1":
        return [Setting(STEPS, _STEP_VALUES)]
    return [Setting(chain.TOPK, _TREES), Setting(chain.DRAFT_TOKENS, ("4", "8", "16"))]


def _around(name: str, launch: Flags, factors: Sequence[float]) -> Setting:
    own = engine_flags.value(launch, name)
    if own is None or not own.isdigit():
        return Setting(name, ())
    return Setting(name, tuple(str(max(1, int(int(own) * factor))) for factor in factors))


def _fractions(launch: Flags) -> tuple[str, ...]:
    try:
        own = float(engine_flags.value(launch, "mem-fraction-static") or "")
    except ValueError:
        return ()
    steps = (own + n * _FRACTION_STEP for n in (-2, -1, 1, 2))
    return tuple(f"{value:.3g}" for value in steps if 0 < value < 1)
