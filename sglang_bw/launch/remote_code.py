"""Code that comes with a model: whose it is, which commit of it, and whether this user trusts that commit.

``--trust-remote-code`` runs Python of the model's repository, which its owner may change on any day. So it runs at a
whole commit only: one that the launch names, or one that the user has trusted here before (:mod:`.pins`). Code of this
disk is the user's own; it can be pinned too, by a digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_bw.errors import UnsafeLaunchError
from sglang_bw.launch import code_files, hub, pins
from sglang_bw.launch.code_source import FLAG, Source, sources
from sglang_bw.launch.command import Command
from sglang_bw.launch.hub import Wanted
from sglang_bw.launch.pins import Pin
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flag, Flags

# Whether the hub has moved on is good to know, and no reason to wait.
_COURTESY_S = 3.0
_HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Found:
    """The commit of a model that a start would use now.

    :ivar where: who says so.
    :ivar problem: why there is none.
    """

    source: Source
    commit: str = ""
    where: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Settled:
    """Whose code may run.

    :ivar flags: revisions to add to the command line.
    :ivar told: what the user should know, a sentence each.
    """

    flags: Flags = ()
    told: tuple[str, ...] = ()

    def applied(self, command: Command) -> Command:
        """Return the launch with its revisions."""
        return replace(command, flags=flags.merge(command.flags, self.flags))


@dataclass(frozen=True)
class Consent:
    """What the user said, and what the answer may do.

    :ivar given: trust what is found (``serve --pin``).
    :ivar kept: record it for later starts.
    :ivar asks: the hub may be asked.
    :ivar again: the command that gives consent.
    """

    given: bool = False
    kept: bool = True
    asks: bool = True
    again: str = "sglang-bw serve RECIPE --pin"

    @property
    def says(self) -> str:
        """What becomes of something that was not trusted before."""
        return "is trusted from now on" if self.kept else "would be trusted; nothing is recorded now"


def recorded(command: Command) -> Flags:
    """Return the revisions that the user has trusted before, for models whose commit the launch does not name.

    :raises UnsafeLaunchError: a record cannot be read.
    """
    loose = [source for source in sources(command) if source.is_loose and source.option]
    known = [(source, pins.find(source.name, source.revision or pins.DEFAULT_REF)) for source in loose]
    return tuple(Flag(source.option, (pin.commit,)) for source, pin in known if pin)


def with_records(command: Command) -> Command:
    """Return a launch at the commits that the user has trusted before."""
    return Settled(recorded(command)).applied(command)


def unpinned(command: Command) -> str:
    """Return whose code would run at no known commit, as a list for people; empty when there is none."""
    return " and ".join(source.title for source in sources(command) if source.is_loose)


def demand(command: Command, environ: Mapping[str, str]) -> None:
    """Refuse a launch that runs code of no known commit; the hub is not asked.

    :raises UnsafeLaunchError: it does, or a pinned directory has changed.
    """
    settle(command, environ, Consent(asks=False))


def settle(command: Command, environ: Mapping[str, str], consent: Consent) -> Settled:
    """Find out whose code a launch runs, and at which commit; with consent trust what is found.

    Nothing is recorded unless all of it is known.

    :raises UnsafeLaunchError: code would run of which no commit is pinned, or a pinned directory has changed.
    :raises OutputError: the record cannot be written.
    """
    told: list[str] = []
    found: list[Found] = []
    refused: list[str] = []
    due: list[tuple[str, str, str]] = []  # to record: model, ref, commit
    for source in sources(command):
        if source.folder is not None:
            code = _Folder.of(source.folder)
            told.append(code.told(consent))
            refused += code.changed(consent)
            due += code.due(consent)
        elif source.is_pinned:
            told += _pinned(source, command, environ, consent)
            due += _by_hand(source, consent)
        else:
            found.append(find(source, command, environ, asks=consent.asks))
    if refused or any(not (one.commit and consent.given) for one in found):
        raise _refusal(found, refused, environ, consent)
    due += [(one.source.name, one.source.revision or pins.DEFAULT_REF, one.commit) for one in found]
    for model, ref, commit in due if consent.kept else ():
        pins.record(model, ref, commit)
    told += [f"code of {one.source.name} at {one.commit}, {one.where}, {consent.says} ({FLAG})" for one in found]
    if due and consent.kept:
        told.append(f"recorded in {pins.root()}; a file that is deleted there is trust that is taken back")
    return Settled(tuple(Flag(one.source.option, (one.commit,)) for one in found), tuple(told))


def find(source: Source, command: Command, environ: Mapping[str, str], *, asks: bool = True) -> Found:
    """Find the commit that a start would use: as the hub's cache notes it, else as the hub says.

    :param asks: whether the hub may be asked.
    """
    if not source.option:
        return Found(source, problem="the engine takes no commit for it: fetch it, and name its directory")
    if hub.is_modelscope(environ):
        return Found(source, problem="models come from ModelScope here, of whose commits nothing is known")
    model = Wanted(source.role, source.name, source.revision, hub.cache_of(command, environ))
    if commit := hub.noted(model):
        return Found(source, commit, f"which is in {model.cache}")
    if hub.is_offline(environ):
        return Found(source, problem=f"it is not in {model.cache}, and HF_HUB_OFFLINE is set")
    if not asks:
        return Found(source, problem=f"it is not in {model.cache}, and the hub was not asked")
    commit, problem = hub.head(model, environ)
    return Found(source, commit, f"which {_site(environ)} has now", problem)


def elsewhere(command: Command, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for code that a model takes from another repository, which no revision pins.

    A configuration's ``auto_map`` may name one as ``owner/other--module.Class``; transformers takes its main branch.
    """
    for source in sources(command):
        model = Wanted(source.role, source.name, source.revision, hub.cache_of(command, environ))
        folder = source.folder or hub.cached(model)
        for other in sorted(code_files.other_repositories(folder) - {source.name}) if folder else ():
            yield f"the {source.role} {source.name} takes code of {other}, whose commit nothing pins"


def _pinned(source: Source, command: Command, environ: Mapping[str, str], consent: Consent) -> Iterator[str]:
    commit = source.revision or ""
    pin = next((pin for pin in pins.of(source.name) if pin.commit == commit), None)
    since = f", trusted here on {pin.date}" if pin else ""
    yield f"code of {source.name} at {commit[:12]} will run ({FLAG}{since})"
    if pin is None or not consent.asks or hub.is_offline(environ) or hub.is_modelscope(environ):
        return
    model = Wanted(source.role, source.name, pin.ref, hub.cache_of(command, environ))
    now, problem = hub.head(model, environ, _COURTESY_S)
    if not problem and now != commit:
        yield (
            f"{_site(environ)} has moved on to {now} of {source.name}, which is not followed; "
            f"`--pin -- --{source.option} {now}` does"
        )


def _by_hand(source: Source, consent: Consent) -> Iterator[tuple[str, str, str]]:
    """Yield a commit that the user named and wants recorded: in place of the model's only record, else for main."""
    known = pins.of(source.name)
    if consent.given and source.revision and source.revision not in [pin.commit for pin in known]:
        yield source.name, known[0].ref if len(known) == 1 else pins.DEFAULT_REF, source.revision


@dataclass(frozen=True)
class _Folder:
    """Code that lies on this disk.

    :ivar digest: of its Python files and of what names them, ``*config.json``.
    """

    path: Path
    digest: str
    pin: Pin | None

    @classmethod
    def of(cls, folder: Path) -> _Folder:
        path = folder.absolute()
        return cls(path, code_files.digest(path), pins.find(str(path), ""))

    @property
    def is_changed(self) -> bool:
        return self.pin is not None and self.pin.commit != self.digest

    def told(self, consent: Consent) -> str:
        text = f"code that lies in {self.path} will run ({FLAG}; {self.digest[:19]}"
        if self.pin and not self.is_changed:
            return f"{text}, trusted here on {self.pin.date})"
        return f"{text}), {consent.says}" if consent.given else f"{text})"

    def changed(self, consent: Consent) -> Iterator[str]:
        if self.pin and self.is_changed and not consent.given:
            yield f"the code in {self.path} is not what you trusted on {self.pin.date}: {self.digest[:19]} now"

    def due(self, consent: Consent) -> Iterator[tuple[str, str, str]]:
        if consent.given and (self.pin is None or self.is_changed):
            yield str(self.path), "", self.digest


def _refusal(found: list[Found], changed: list[str], environ: Mapping[str, str], consent: Consent) -> UnsafeLaunchError:
    lines = list(changed)
    if found:
        who = " and ".join(one.source.title for one in found)
        lines.append(f"{FLAG} runs what the hub has today of {who}: no commit is pinned")
    lines += [f"  {one.source.role}: {_said(one)}" for one in found]
    known = [one for one in found if one.commit]
    hints = []
    if known:
        site = _site(environ)
        hints.append("read that code: " + ", ".join(f"{site}/{one.source.name}/tree/{one.commit}" for one in known))
    if changed or len(known) == len(found):
        hints.append(f"then `{consent.again}` trusts it, and later starts do without asking")
    elif any(one.source.option for one in found):
        hints.append(f"`{consent.again}` looks again, and trusts what it finds")
    words = " ".join(f"--{one.source.option} {one.commit or 'COMMIT'}" for one in found if one.source.option)
    if words:
        which = "exactly that commit, whatever the hub has by then" if known else "a commit that you know"
        hints.append(
            f"{which}: `-- {words}`, with --pin for later starts too; or `revision:` in a copy of the recipe. "
            "`trust-remote-code: null` there takes the flag away."
        )
    return UnsafeLaunchError("\n".join(lines), hint="\n  ".join(hints))


def _said(one: Found) -> str:
    return f"commit {one.commit}, {one.where}" if one.commit else f"no commit was found: {one.problem}"


def _site(environ: Mapping[str, str]) -> str:
    return (environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
