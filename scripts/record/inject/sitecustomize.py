"""Loaded by every Python process of a measured server, for what the engine has no switch for.

``BW_CONTROL`` names a file of JSON: ``accept_length`` replaces SGLANG_SIMULATE_ACC_LEN while the server runs (one
process a server: ranks would draw different numbers), ``steps`` overrules the goodput policy (-1: it decides).
``BW_ROUNDS`` names a file that gets a line for every decode round: steps, batch, mean accepted drafts, launch gap.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

POLL_S = 0.02
_forced = -1


def _follow(path: Path) -> None:
    global _forced
    modules: dict[str, Any] = sys.modules
    seen = ""
    hooked = False
    while True:
        time.sleep(POLL_S)
        utils = modules.get("sglang.srt.speculative.spec_utils")
        if utils is None or not hasattr(utils, "SIMULATE_ACC_LEN"):
            continue
        policy = modules.get("sglang.srt.speculative.goodput_params")
        if not hooked and policy is not None and hasattr(policy, "GoodputParams"):
            _hook(policy.GoodputParams)
            hooked = True
        text = path.read_text()
        if text != seen and text.endswith("\n"):
            seen, wanted = text, json.loads(text)
            utils.SIMULATE_ACC_LEN = wanted["accept_length"]
            _forced = wanted.get("steps", -1)


def _hook(params: Any) -> None:
    decide, learn = params.get_steps_for_batch, params.on_round
    # Open for the life of the process; a line at a time, for a reader while it runs.
    out = Path(os.environ["BW_ROUNDS"]).open("w", buffering=1) if os.environ.get("BW_ROUNDS") else None  # noqa: SIM115

    def get_steps_for_batch(self: Any, batch: int) -> int:
        steps: int = decide(self, batch)
        return steps if _forced < 0 else _forced

    def on_round(self: Any, done: Any) -> Any:
        if out:
            accepted = done.num_correct_drafts_per_req
            mean = sum(accepted) / max(len(accepted), 1)
            out.write(f"{done.num_steps},{done.batch_size},{mean:.3f},{done.launch_gap_s}\n")
        return learn(self, done)

    params.get_steps_for_batch, params.on_round = get_steps_for_batch, on_round


if os.environ.get("BW_CONTROL"):
    threading.Thread(target=_follow, args=(Path(os.environ["BW_CONTROL"]),), daemon=True).start()
