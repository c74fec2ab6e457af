"""From what a user types to a question for the plan: recipe, machine, engine, command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_bw.errors import (
    GpuSelectionError,
    NotInstalledError,
    PlanInputError,
    SpeculationInputError,
    UnknownBoardError,
)
from sglang_bw.fork.series import Series, newest_base, patches_root
from sglang_bw.fork.verify import State
from sglang_bw.host import boards, fingerprint, nvml, probes
from sglang_bw.host.boards import Board
from sglang_bw.host.gpus import Gpus
from sglang_bw.launch import code_source, remote_code, secret, selection
from sglang_bw.launch import command as commands
from sglang_bw.launch import engine as engines
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.plan.question import PlannedEngine, Question
from sglang_bw.plan.resolve import EngineFiles, is_of_the_engine
from sglang_bw.plan.speculation import probe as round_probes
from sglang_bw.recipes import flags, releases
from sglang_bw.recipes.flags import Flag, Flags
from sglang_bw.recipes.hardware import Device, Hardware
from sglang_bw.recipes.origin import Origin, of_flags
from sglang_bw.recipes.schema import Recipe


@dataclass(frozen=True)
class Wish:
    """What a user typed; the options of ``plan``.

    :ivar version: plan for this release of the engine instead of the installed one.
    """

    name: str
    model: str | None = None
    draft: str | None = None
    gpus: str | None = None
    fabric: str | None = None
    context: int | None = None
    concurrency: int | None = None
    speculate: bool = True
    version: str | None = None
    python: Path | None = None
    tree: Path | None = None
    fetch: bool = False
    extra: Flags = ()


def question(wish: Wish) -> Question:
    """Turn a wish into a question.

    :raises UnknownRecipeError: no such recipe or model.
    :raises UnknownBoardError: no such board.
    :raises PlanInputError: it is not known for which machine, or for which engine.
    """
    recipe = selection.select(wish.name, model=wish.model, draft=wish.draft)
    machine, board, notes = _machine(recipe, wish)
    engine = _engine(wish)
    extra, note = divided(wish.name, wish.extra, machine.count if wish.gpus else 1)
    notes = (*notes, note) if note else notes
    # What is set in this shell says nothing of a launch elsewhere.
    environ = os.environ if _is_here(machine) else {}
    command = commands.build(recipe, machine, environ, speculate=wish.speculate, extra=extra, version=engine.version)
    command = remote_code.with_records(command)
    env = judged(environ, command)
    here = [name for name in sorted(env) if environ.get(name) == env[name]]
    if here:
        said = ", ".join(f"{name}={secret.shown_variable(name, env[name])}" for name in here)
        notes = (*notes, f"set in this shell, and so for `serve`: {said}")
    made = of_command(recipe, command.flags, env, machine, board, engine, wish=wish, notes=notes)
    return replace(made, warnings=_of_serve(command, wish.name))


def judged(environ: Mapping[str, str], command: Command) -> dict[str, str]:
    """Return the variables that a plan may judge by: the launch's own, and what it inherits for rules and engine.

    All others stay out: they would make an engine that was asked before another one.

    :param environ: what the engine inherits, where the launch does not say otherwise.
    """
    from sglang_bw.plan.rules import check

    inherited = {
        name: value
        for name, value in environ.items()
        if (name in check.variables() or is_of_the_engine(name)) and not secret.is_secret_variable(name)
    }
    return {**inherited, **command.env}


def _of_serve(command: Command, name: str) -> tuple[str, ...]:
    """Return what `serve` will want that has nothing to do with the machine."""
    if not (who := remote_code.unpinned(command)):
        return ()
    told = f"`serve` will ask for a commit: {code_source.FLAG} runs code of {who}, and none is pinned; "
    return (f"{told}`sglang-bw serve {name} --pin` looks it up and records it",)


def divided(name: str, extra: Flags, count: int) -> tuple[Flags, str]:
    """Divide a model over the GPUs that the user names; a recipe and the user's own flags say it themselves.

    :param count: GPUs named; without any the engine's own default counts, which is one.
    :return: the engine flags, and what to tell the user of it.
    """
    if count < 2 or not selection.is_model(name) or any(flags.has(extra, size) for size in ("tp-size", "pp-size")):
        return extra, ""
    note = f"--tp-size {count}: a model is divided over the GPUs of --gpus unless flags behind -- say otherwise"
    return (*extra, Flag("tp-size", (str(count),))), note


def of_command(
    recipe: Recipe,
    command_line: Flags,
    env: Mapping[str, str],
    machine: Hardware,
    board: Board,
    engine: PlannedEngine,
    *,
    wish: Wish,
    notes: tuple[str, ...] = (),
) -> Question:
    """Return the question about a command line that is already put together."""
    return Question(
        recipe=recipe,
        flags=command_line,
        env=env,
        machine=machine,
        board=board,
        engine=engine,
        context=wish.context,
        concurrency=wish.concurrency,
        fetch=wish.fetch,
        notes=notes,
    )


def planned(engine: Engine) -> PlannedEngine:
    """Return what a plan needs of an installed engine."""
    there = engine.installation
    files = None
    if there.location:
        files = EngineFiles(engine.python, there.location, there.version, engine.tree)
    return PlannedEngine(there.version, _topics(patch.file for patch in there.patches), files)


def with_round(question: Question, given: Path | None) -> tuple[Question, Path | None]:
    """Return the result of `probe round` to plan with, and the question with a note of it.

    :param given: what the user names; it is used whatever it was measured on, and the note says so. Otherwise what is
        stored for the recipe on this host, where the plan is for the GPUs here and it may be believed.
    :raises SpeculationInputError: the file that the user names cannot be read or is none.
    """
    if not flags.has(question.flags, "speculative-algorithm"):
        return question, given
    if given:
        why = round_probes.doubt(given, _origin(question, key_here(question) or ""))
        return (noted(question, f"{given} may not hold for this launch: {why}") if why else question), given
    key = key_here(question)
    place = probes.place("round", key, question.recipe.id, question.machine.device) if key else None
    if place is None or not place.is_file():
        return question, None
    try:
        why = round_probes.doubt(place, _origin(question, key or ""))
    except SpeculationInputError as error:
        why = error.message
    if why:
        return noted(question, f"{place} is not used: {why}; `sglang-bw probe round` measures again"), None
    return noted(question, f"cost of a round: measured here, {place}"), place


def key_here(question: Question) -> str | None:
    """Return the key of this host where the plan is for its GPUs."""
    return fingerprint.take().key if _is_here(question.machine) else None


def _is_here(machine: Hardware) -> bool:
    here = seen(nvml.read(nvml.load()))
    return here is not None and here[0].board == machine.board and here[0].count >= machine.count


def _origin(question: Question, key: str) -> Origin:
    return Origin(
        key, question.recipe.id, question.engine.version or "", question.machine.device, of_flags(question.flags)
    )


def noted(question: Question, note: str) -> Question:
    """Return the question with one more note."""
    return replace(question, notes=(*question.notes, note))


def _machine(recipe: Recipe, wish: Wish) -> tuple[Hardware, Board, tuple[str, ...]]:
    if wish.gpus is not None:
        count, board = boards.parse_gpus(wish.gpus)
        return _hardware(board, count, wish.fabric), board, ()
    if recipe.hardware.board:
        board = boards.find(recipe.hardware.board[0])
        count = recipe.hardware.gpus[0] if recipe.hardware.gpus else 1
        note = f"for {count}x {board.name}, the recipe's machine; --gpus plans for another"
        return _hardware(board, count, wish.fabric), board, (note,)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found := seen(nvml.read(nvml.load()), visible):
        machine, board = found
        which = "the GPUs of this machine" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} here"
        return machine, board, (f"for {machine.count}x {board.name}, {which}",)
    none = "there is none here" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} shows none here"
    raise PlanInputError(
        f"it is not known for which GPUs to plan {recipe.id}: {none}, and no recipe names any",
        hint="Name them: --gpus 8x'RTX PRO 6000'.",
    )


def machine(recipe: Recipe, device: Device, here: Gpus | None, wanted: str | None = None) -> Hardware:
    """Return the machine that a launch is for: the GPUs of this one, or, where none are seen, the recipe's.

    :param here: the GPUs of this machine; ``None`` when nobody looked.
    :param wanted: which of them, as in ``0-3``.
    """
    if device == "cpu":
        return Hardware(device="cpu")
    if found := seen(here, wanted):
        return found[0]
    boards_of_recipe = recipe.hardware.board
    if not boards_of_recipe:
        return Hardware(device="cuda")
    count = recipe.hardware.gpus[0] if recipe.hardware.gpus else 1
    return _hardware(boards.find(boards_of_recipe[0]), count)


def meant(recipe: Recipe, chosen: Hardware) -> tuple[Hardware, Board] | None:
    """Return a machine that is not this one as a plan takes it: the recipe's; ``None`` when it names none."""
    if not (recipe.hardware.board and chosen.board):
        return None
    return chosen, boards.find(chosen.board)


def seen(here: Gpus | None, wanted: str | None = None) -> tuple[Hardware, Board] | None:
    """Return the GPUs of this machine as a plan takes them; ``None`` when there are none, or only parts of some."""
    hidden = wanted is not None and not wanted.strip()  # CUDA_VISIBLE_DEVICES, set and empty
    if here is None or not here.boards or hidden:
        return None
    try:
        chosen = here.only(wanted).boards if wanted else here.boards
    except GpuSelectionError:
        return None
    first = chosen[0]
    try:
        board = boards.find(first.name)
    except UnknownBoardError:
        memory = (first.memory or 0) >> 20
        board = Board(first.name, first.arch, memory, source="the driver")
    fabric = "nvlink" if all(gpu.nvlinks for gpu in chosen) else "pcie"
    return _hardware(board, len(chosen), fabric), board


def _hardware(board: Board, count: int, fabric: str | None = None) -> Hardware:
    return Hardware("cuda", board.arch, board.name, (fabric or board.fabric) if count > 1 else "", count)


def _engine(wish: Wish) -> PlannedEngine:
    if wish.version is None:
        try:
            installed = engines.find(wish.python, wish.tree)
        except NotInstalledError:
            installed = None
        if installed and installed.installation.state is not State.ABSENT:
            return planned(installed)
        return of_series()
    try:
        releases.known(wish.version)
    except ValueError as error:
        raise PlanInputError(str(error), hint="Write for example --engine 0.5.9.") from error
    series = of_series()
    return series if wish.version == series.version else PlannedEngine(wish.version)


def of_series() -> PlannedEngine:
    """Return the engine that ``install`` would put there."""
    root = patches_root()
    series = Series.load(root, newest_base(root))
    return PlannedEngine(series.pins.full_version, _topics(path.name for path in series.files))


def _topics(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.removesuffix(".patch")[5:] for name in names)
