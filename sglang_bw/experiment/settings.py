"""How a comparison is run: the load, and when it is enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_bw.errors import RefusedMeasurementError
from sglang_bw.experiment import prompts
from sglang_bw.experiment.client import Sampling
from sglang_bw.experiment.prompts import PromptSet
from sglang_bw.experiment.verdict import Limits


@dataclass(frozen=True)
class Settings:
    """How a comparison is run.

    :ivar rounds: so many if the budget allows; ``None`` to go on until every half-width is within ``within``.
    :ivar within: half-width of the 95 % interval, as a share of the ratio.
    :ivar budget_s: no round begins that would end later than this.
    :ivar flush: empty the prefix cache before each block.
    :ivar allow_random: measure random tokens all the same.
    """

    prompts: PromptSet
    sampling: Sampling = field(default_factory=Sampling)
    concurrencies: tuple[int, ...] = (1,)
    rounds: int | None = None
    within: float = 0.03
    budget_s: float = 1800.0
    limits: Limits = field(default_factory=Limits)
    flush: bool = True
    allow_random: bool = False

    def __post_init__(self) -> None:
        """Make sure that so many requests can be open.

        :raises RefusedMeasurementError: there are fewer prompts; another concurrency would be measured under its name.
        """
        count, most = len(self.prompts.prompts), max(self.concurrencies)
        if count < most:
            larger = ", ".join(prompts.names_with(most)) or "none"
            raise RefusedMeasurementError(
                f"{self.prompts.name} has {count} prompts here: never would {most} requests be open at a time",
                hint=f"Ask for at most {count} at once, or take a set of at least {most} prompts: --prompts FILE "
                f"(bundled: {larger}), and no smaller --count.",
            )

    def refuse_noise(self, arm: str) -> None:
        """Refuse random tokens for an arm that speculates.

        :raises RefusedMeasurementError: some prompt is random tokens, and nobody has allowed that.
        """
        if self.prompts.is_noise and not self.allow_random:
            raise RefusedMeasurementError(
                f"arm {arm} speculates, and random tokens inflate the accept length: it may be twice a real one",
                hint="Take a set of real text (--prompts chat); `ab --allow-random` measures all the same.",
            )

    def described(self) -> dict[str, Any]:
        """Return what a record keeps of them."""
        sampling, limits = self.sampling, self.limits
        return {
            "prompts": self.prompts.name,
            "prompts_digest": self.prompts.digest,
            "prompt_count": len(self.prompts.prompts),
            "random_tokens": self.prompts.is_noise,
            "concurrency": list(self.concurrencies),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": sampling.ignore_eos,
            "seed": sampling.seed,
            "flush": self.flush,
            "rounds": self.rounds,
            "within": self.within,
            "budget_s": self.budget_s,
            "limits_s": {"ttft": limits.ttft_s, "tpot": limits.tpot_s, "e2e": limits.e2e_s},
        }
