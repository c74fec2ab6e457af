"""Comparisons as `ab` records them, with numbers drawn from a seed; what came from outside is hostile."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from sglang_bw.ledger.record import (
    ArmNumbers,
    ArmRecord,
    Block,
    Difference,
    EngineRecord,
    Host,
    Outcome,
    OutputComparison,
    Ratio,
    RequestRow,
    RunRecord,
)

BEGAN = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
SCRIPT = "<script>document.title = 'owned'</script>"
HOSTILE = f"{SCRIPT}\"'><img src=x onerror=\"document.title='owned'\">&amp;{{{{ 7*7 }}}}]]>"
CONCURRENCIES = (1, 4, 16)


def host(**more: Any) -> Host:
    fields = {"fingerprint": "0123456789ab", "cpu": "a CPU", "cores": 2, "memory_gib": 24.0, **more}
    return Host.model_validate(fields)


def row(dice: random.Random, name: str, scale: float, *, speculates: bool) -> RequestRow:
    ttft, tpot = 0.05 * scale * dice.uniform(0.8, 1.6), 0.01 * scale * dice.uniform(0.9, 1.2)
    return RequestRow(
        prompt=name, began_s=dice.uniform(0, 3), ttft_s=ttft, tpot_s=tpot, itl_s=(tpot, 2 * tpot, 4 * tpot),
        e2e_s=ttft + 63 * tpot, prompt_tokens=20, output_tokens=64, rounds=20 if speculates else 0,
        accepted=44 if speculates else 0, histogram=(4, 4, 6, 6) if speculates else (), finish="length",
    )  # fmt: skip


def arm(name: Any, says: str, **more: Any) -> ArmRecord:
    engine = EngineRecord(
        version="0.5.23+bw.1", series="bw.1", tree="fa29194a88aa", patches=("0001-run-on-a-cpu.patch",)
    )
    config = {
        "mem_fraction_static": 0.8,
        "max_running_requests": 16,
    }
    memory = {"weights": 14.2, "KV cache": 50.1, "graphs": 1.3, "free": 8.0}
    return ArmRecord(
        name=name, says=says, url="http://127.0.0.1:30000", engine=engine, kv_tokens=16384, graphs=True, config=config,
        memory=memory, argv=("--model-path", f"/models/{HOSTILE}"), **more,
    )  # fmt: skip


def numbers(tok_s: float, concurrency: int, *, speculates: bool) -> ArmNumbers:
    times = (0.05, 0.08, 0.1)
    return ArmNumbers(
        tok_s=tok_s, tok_s_user=tok_s / concurrency, ttft_s=times, tpot_s=times, itl_s=times, e2e_s=times, kv_use=0.3,
        accept_length=3.2 if speculates else None, histogram=(40, 40, 60, 60) if speculates else (), graph_share=1.0,
    )  # fmt: skip


def ratio(concurrency: int, value: float) -> Ratio:
    verdict: Any = "faster" if value > 1.03 else "slower" if value < 0.97 else "undecided"
    plain = 90.0 * concurrency**0.8
    return Ratio(
        concurrency=concurrency, value=value, low=value - 0.03, high=value + 0.03, half_width=0.03, rounds=4, prompts=8,
        verdict=verdict, drift=1.004, drifted=False, round_cost=3.2 / value,
        a=numbers(plain, concurrency, speculates=False), b=numbers(plain * value, concurrency, speculates=True),
    )  # fmt: skip


def blocks(dice: random.Random) -> tuple[Block, ...]:
    found = []
    for concurrency in CONCURRENCIES:
        for number in range(4):
            for name in ("AB", "BA")[number % 2]:
                rows = tuple(
                    row(dice, f"chat-{n}", 1.0 if name == "A" else 0.7, speculates=name == "B") for n in range(8)
                )
                found.append(
                    Block(
                        arm=name, round=number, position=len(found), concurrency=concurrency, rows=rows, seconds=4.0,
                        began=BEGAN + timedelta(seconds=5 * len(found)), kv_use=0.3,
                    )
                )  # fmt: skip
    return tuple(found)


def run(name: str = "20261129-120000-abcdef", **more: Any) -> RunRecord:
    """A whole run; ``more`` replaces fields."""
    dice = random.Random(7)
    first = Difference(prompt=HOSTILE, concurrency=1, position=17, unit="token", before="x", a=HOSTILE, b="</table>")
    outcome = Outcome(
        ended=BEGAN + timedelta(minutes=3),
        valid=True,
        ratios=tuple(ratio(c, v) for c, v in zip(CONCURRENCIES, (1.42, 1.0, 0.86), strict=True)),
        outputs=OutputComparison(compared=24, different=1, unsteady=0, first=first),
        warnings=(f"a warning with {SCRIPT}",),
    )
    fields: dict[str, Any] = {
        "id": name, "began": BEGAN, "tool": "0.1.0", "hypothesis": f"speculation pays {SCRIPT}", "recipe": "tiny",
        "arms": (arm("A", "tiny without speculation"), arm("B", f"tiny {SCRIPT}", speculation="EAGLE3")),
        "host": host(),
        "difference": {"speculative_algorithm": (None, "EAGLE3"), HOSTILE: (HOSTILE, 2)}, "blocks": blocks(dice),
        "settings": {"temperature": 0}, "outcome": outcome,
    }  # fmt: skip
    return RunRecord.model_validate({**fields, **more})
