"""Both arms of a comparison, and which of them runs."""

from __future__ import annotations

from collections.abc import Callable

from sglang_bw.experiment import arm as arms
from sglang_bw.experiment.arm import Arm, ArmPlan, Name


class Pair:
    """Both arms, started when they are needed: at once, or one after the other where the GPUs hold only one."""

    def __init__(self, plans: tuple[ArmPlan, ArmPlan], start: Callable[[ArmPlan], Arm], *, together: bool) -> None:
        self._plans: dict[Name, ArmPlan] = {plan.name: plan for plan in plans}
        self._start = start
        self.together = together
        self._running: dict[Name, Arm] = {}

    def use(self, name: Name) -> tuple[Arm, bool]:
        """Return an arm that runs, and whether it has just been started."""
        if name in self._running:
            return self._running[name], False
        if not self.together:
            self.close()
        self._running[name] = self._start(self._plans[name])
        return self._running[name], True

    def why(self, name: Name) -> str | None:
        """Return why the engine of an arm is gone, if it is and was started here."""
        return self._running[name].why_it_ended() if name in self._running else None

    def close(self) -> None:
        """Stop what runs."""
        arms.stop(self._running.values())
        self._running.clear()
