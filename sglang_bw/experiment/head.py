"""The first line of a run: what is compared, on which machine, and whether its speeds are real."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime

from sglang_bw import __version__
from sglang_bw.experiment import arm as arms
from sglang_bw.experiment.arm import ArmPlan
from sglang_bw.experiment.settings import Settings
from sglang_bw.host import fingerprint
from sglang_bw.launch.engine import Engine
from sglang_bw.ledger.record import RunRecord

_SIMULATION = "SGLANG_SIMULATE_ACC_LEN"


def head(plans: tuple[ArmPlan, ArmPlan], engine: Engine | None, settings: Settings, *, recipe: str | None) -> RunRecord:
    """Return the first line of a run.

    :param engine: that will be started; ``None`` for servers that run already.
    """
    began = datetime.now(UTC)
    a, b = plans
    environs = [arms.environment(plan.command, engine) for plan in plans if plan.command and engine]
    return RunRecord(
        id=f"{began:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        began=began,
        tool=__version__,
        hypothesis=f"{b.says} against {a.says}",
        recipe=recipe,
        host=fingerprint.look(local=all(arms.is_local(plan.url) for plan in plans)),
        arms=(arms.planned(a, engine), arms.planned(b, engine)),
        simulated=any(map(_simulates, environs)),
        settings=settings.described(),
    )


def _simulates(environ: Mapping[str, str]) -> bool:
    """Tell whether an engine with this environment invents its accept length: it does above 0."""
    with contextlib.suppress(ValueError):
        return float(environ.get(_SIMULATION, "")) > 0
    return False
