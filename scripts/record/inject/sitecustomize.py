"""Loaded by every Python process of a measured server, for what the engine has no switch for.

``BW_CONTROL`` names a file of JSON: ``accept_length`` replaces SGLANG_SIMULATE_ACC_LEN while the server runs (-1: real
acceptance; change it while the server is idle, or ranks follow at different rounds), ``steps`` overrules the goodput
policy (-1: it decides; a list: one a decode launch, over and over), ``slow_rank`` sleeps ``slow_ms`` before each of its
decode launches.
``BW_ROUNDS`` names a file that gets a line a decode round of rank 0: time, steps, batch, mean accepted drafts, launch
gap.
``BW_DECISIONS`` names a folder where each rank writes what it launched and what it learned, in its order.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, TextIO

POLL_S = 0.02
_wanted: dict[str, Any] = {}
_files: dict[Path, TextIO] = {}


def _follow(path: Path) -> None:
    modules: dict[str, Any] = sys.modules
    seen = ""
    hooked: set[str] = set()
    while True:
        time.sleep(POLL_S)
        utils = modules.get("sglang.srt.speculative.spec_utils")
        if utils is None or not hasattr(utils, "sample_simulated_acc_len"):
            continue
        if "utils" not in hooked:
            utils.sample_simulated_acc_len = _same_on_every_rank(utils.sample_simulated_acc_len)
            hooked.add("utils")
        policy = modules.get("sglang.srt.speculative.goodput_params")
        if "policy" not in hooked and policy is not None and hasattr(policy, "GoodputParams"):
            _hook(policy.GoodputParams)
            hooked.add("policy")
        text = path.read_text()
        if text != seen and text.endswith("\n"):
            seen = text
            _wanted.update(json.loads(text))
            utils.SIMULATE_ACC_LEN = _wanted["accept_length"]


def _same_on_every_rank(sample: Any) -> Any:
    """Return the engine's ``sample`` with random numbers of its own, which nothing else on a rank draws from."""
    import torch

    own = torch.Generator().manual_seed(0).get_state()

    def drawn(*arguments: Any) -> Any:
        nonlocal own
        others = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            return sample(*arguments)
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(others)

    return drawn


def _hook(params: Any) -> None:
    decide, learn = params.get_steps_for_batch, params.on_round
    launches = itertools.count()

    def note(*words: object) -> None:
        if folder := os.environ.get("BW_DECISIONS"):
            _write(Path(folder) / f"rank{_rank()}", *words)

    def get_steps_for_batch(self: Any, batch: int) -> int:
        if batch and _wanted.get("slow_ms") and _wanted.get("slow_rank") == _rank():
            time.sleep(_wanted["slow_ms"] / 1e3)
        steps: int = decide(self, batch)
        forced = _wanted.get("steps", -1)
        if isinstance(forced, list):
            forced = forced[next(launches) % len(forced)] if batch else -1
        if forced >= 0:
            steps = forced
        if batch:
            note("launch", batch, steps)
        return steps

    def on_round(self: Any, done: Any) -> Any:
        accepted = done.num_correct_drafts_per_req
        if not _rank() and (path := os.environ.get("BW_ROUNDS")):
            mean = sum(accepted) / max(len(accepted), 1)
            _write(Path(path), f"{time.time():.4f}", done.num_steps, done.batch_size, f"{mean:.3f}", done.launch_gap_s)
        note("round", done.batch_size, done.num_steps, zlib.crc32(bytes(accepted)))
        return learn(self, done)

    params.get_steps_for_batch, params.on_round = get_steps_for_batch, on_round


def _write(path: Path, *words: object) -> None:
    if path not in _files:  # open for the life of the process; a line at a time, for a reader while it runs
        _files[path] = path.open("w", buffering=1)
    _files[path].write(",".join(map(str, words)) + "\n")


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


if os.environ.get("BW_CONTROL"):
    threading.Thread(target=_follow, args=(Path(os.environ["BW_CONTROL"]),), daemon=True).start()
