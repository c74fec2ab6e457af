"""What a start leaves in the ledger, and what the ledger knows of a launch before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sglang_bw.fork.verify import Installation
from sglang_bw.launch.command import Command
from sglang_bw.launch.server import Server
from sglang_bw.launch.startup import Phase
from sglang_bw.ledger import identity
from sglang_bw.ledger.entry import Entry, Number, Result, new_id
from sglang_bw.ledger.failure import FailureClass, classify
from sglang_bw.ledger.record import EngineRecord, Host
from sglang_bw.recipes import flags

_MOST_LINES = 20


@dataclass(frozen=True)
class Attempt:
    """One launch, before anybody knows how it ends.

    :ivar hypothesis: what the user expects of it.
    :ivar changes: what is different from the recipe: key -> (before, after).
    """

    recipe: str
    command: Command
    installation: Installation
    host: Host
    hypothesis: str = ""
    changes: Mapping[str, tuple[str | None, str | None]] | None = None

    @property
    def launch(self) -> str:
        """Digest of the exact launch."""
        return launch_digest(self.installation, self.command)

    def entry(self, result: Result, **more: object) -> Entry:
        """Return an entry about this launch; ``more`` are other fields of :class:`Entry`."""
        now = datetime.now(UTC)
        fields = {
            "id": new_id(now),
            "kind": "start",
            "at": now,
            "hypothesis": self.hypothesis,
            "recipe": self.recipe,
            "changes": dict(self.changes or {}),
            "against": self.recipe if self.changes else "",
            "engine": engine_record(self.installation),
            "host": self.host,
            "launch": self.launch,
            "argv": tuple(flags.tokens(self.command.shown_flags)),
            "env": self.command.shown_env,
            "result": result,
        }
        return Entry.model_validate({**fields, **more})

    def started(self, server: Server, *, accept_length: float | None, tokens_per_second: float | None) -> Entry:
        """Return the entry of a start that ended with an answering server."""
        numbers = {f"seconds {phase.value}": Number(value=s, unit="s") for phase, s in server.startup.seconds.items()}
        if accept_length is not None:
            numbers["accept length"] = Number(value=accept_length)
        if tokens_per_second is not None:
            numbers["warm-up"] = Number(value=tokens_per_second, unit="tok/s")
        return self.entry("ok", numbers=numbers, artefacts=(str(server.process.log),))

    def died(self, server: Server, why: str, *, failure: FailureClass | None = None) -> Entry:
        """Return the entry of an engine that died, or was not ready in time.

        :param why: one line.
        :param failure: ``None`` to tell from that line.
        """
        phase = server.startup.phase
        where = "after it had started" if phase is Phase.READY else f"while {phase.value}"
        return self.entry(
            "failed",
            failure=failure or classify(why, phase=phase.value),
            summary=f"{where}, after {server.startup.elapsed():.0f} s",
            evidence=tuple(dict.fromkeys([why, *_proof(server)])),
            artefacts=(str(server.process.log),),
        )

    def interrupted(self, server: Server, why: str = "") -> Entry:
        """Return the entry of a start that ended for no fault of the launch: the user's wish, or another process."""
        summary = f"while {server.startup.phase.value}"
        return self.entry(
            "interrupted", summary=summary, evidence=(why,) if why else (), artefacts=(str(server.process.log),)
        )


def launch_digest(installation: Installation, command: Command) -> str:
    """Return the digest of exactly this command on exactly this engine."""
    engine = f"{installation.version} {installation.tree} {installation.digest} {installation.state.value}"
    return identity.digest(engine, command.flags, command.env)


def engine_record(installation: Installation) -> EngineRecord:
    """Return what records say of an installed engine."""
    _, plus, series = installation.version.partition("+")
    return EngineRecord(
        version=installation.version,
        series=series if plus else None,
        tree=installation.tree or None,
        patches=tuple(patch.file for patch in installation.patches),
    )


def _proof(server: Server) -> list[str]:
    """Return the last lines of the engine's log."""
    try:
        with server.process.log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(server.log_offset, file.tell() - (64 << 10)))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip()[:500] for line in lines if line.strip()][-_MOST_LINES:]
