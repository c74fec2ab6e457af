"""Expert parallelism over two ranks: a tiny Kimi-K2.5 in bf16 and INT4, with EPLB and an EAGLE-3 draft on top.

Beside it a tiny GLM-4.x, since stock moves the experts of Kimi-K2.5, but not of this one.
"""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from record.servers import CHAIN, Answer, Record

from . import glm, greedy, kimi, marlin
from .bench import Bench, last_words

MODELS: dict[str, Callable[[Path], Path]] = {
    "bf16": lambda folder: kimi.write(folder, int4=False),
    "int4": lambda folder: kimi.write(folder, int4=True),
    "glm": glm.write,
}
# What a backend needs to be importable; the others of the engine are for other hardware.
BACKENDS = {"none": "", "deepep": "deep_ep", "mooncake": "mooncake.ep", "nixl": "nixl_ep", "flashinfer": "flashinfer",
            "pplx": "pplx_kernels"}  # fmt: skip
# Experts by DeepGEMM, in the one mode that it has for bf16, with no more tokens at a time than a rank may send there.
# For INT4 experts the engine has no kernels behind it.
DEEPEP: Record = {"moe-a2a-backend": "deepep", "deepep-mode": "low_latency", "moe-runner-backend": "deep_gemm",
                  "chunked-prefill-size": 128}  # fmt: skip
# Two GPUs of one host need no network between them.
ENVIRON = {"deepep": {"NVSHMEM_REMOTE_TRANSPORT": "none"}}
# The first INT4 server on a machine compiles two variants of Marlin's MoE kernel; each takes a core for minutes.
COMPILING_S = 480.0
ANSWER_S = 60.0
Known = dict[tuple[str, str], tuple[list[Answer], float]]
"""By model and backend: the plain server's greedy answers, one at a time, and how far several at once part from them.

That is what rounding does there, in units of bf16's last place: of others no less can be asked.
"""
SPECULATIVE: Record = {"speculative-algorithm": "EAGLE3", **CHAIN}
REBALANCED = re.compile(r"TP0\b.*rebalance end")


@dataclass(frozen=True)
class Arm:
    """One server.

    :ivar tree: ``stock`` or ``patched``.
    :ivar flags: over the common ones.
    :ivar backend: moves the tokens between the experts; its kernels round in their own way, so that an arm is
        compared with the plain one of its model and backend.
    """

    name: str
    tree: str
    model: str
    draft: bool = False
    flags: Record = field(default_factory=dict)
    backend: str = "none"


def run(bench: Bench) -> None:
    """Start all servers beside each other, ask each, and compare with the plain one of its weights."""
    options, record = bench.options, bench.record
    record["backends"] = {name: absent(module) or "installed" for name, module in BACKENDS.items()}
    found = arms([name for name, said in record["backends"].items() if said == "installed"], options.iterations)
    models = {name: write(bench.scratch / f"moe-{name}") for name, write in MODELS.items() if name in options.models}
    draft = kimi.write_draft(bench.scratch / "kimi-draft")
    if "int4" in models and options.device == "cuda":
        bench.compiling = marlin.compile_variants(options.patched, bench.scratch)
    chosen = [arm for arm in found if arm.model in models and (not arm.draft or (options.only or "") in arm.name)]
    for arm in chosen:
        own = flags(bench, arm, models[arm.model], draft)
        server = bench.start(arm.name, getattr(options, arm.tree), own, environment(bench, arm))
        server.answer_s = ANSWER_S
    record["arms"] = {}
    known: Known = {}
    until = time.monotonic() + max(options.start_limit, COMPILING_S)
    while chosen:
        if arm := _next(bench, chosen, until):
            chosen.remove(arm)
            record["arms"][arm.name] = _arm(bench, arm, known)
            bench.keep()
        else:
            time.sleep(0.5)
    lost = [name for name, row in record["arms"].items() if not row["lossless"] and not name.startswith("stock")]
    if lost:
        raise RuntimeError(f"patched, and failed or with other tokens: {', '.join(lost)}")


def arms(backends: list[str], iterations: int) -> list[Arm]:
    """Return the servers, the plain ones first."""
    eplb: Record = {"enable-eplb": None, "eplb-rebalance-num-iterations": iterations}
    found = [Arm(f"patched {model} plain", "patched", model) for model in MODELS]
    others = [("bf16", name) for name in backends if name != "none"]
    found += [Arm(f"patched {model} {name} plain", "patched", model, False, _a2a(name), name) for model, name in others]
    found += [Arm(f"patched {model} {name}", "patched", model, True, _a2a(name), name) for model, name in others]
    for model in MODELS:
        # Stock's GLM has no slots for more experts, which is another fault than the one that shows here.
        moved = eplb | ({} if model == "glm" else {"ep-num-redundant-experts": 2})
        if model != "glm":
            found.append(Arm(f"patched {model} none", "patched", model, True))
        found += [Arm(f"{tree} {model} eplb", tree, model, True, moved) for tree in ("patched", "stock")]
    return sorted(found, key=lambda arm: arm.draft)


def _a2a(name: str) -> Record:
    return DEEPEP if name == "deepep" else {"moe-a2a-backend": name}


def flags(bench: Bench, arm: Arm, model: Path, draft: Path) -> Record:
    """Return a server's flags."""
    options = bench.options
    common: Record = {
        "model-path": str(model), "trust-remote-code": None, "skip-tokenizer-init": None, "dtype": "bfloat16",
        "device": options.device, "tp-size": options.tp, "ep-size": options.tp, "max-total-tokens": 8192,
        "max-running-requests": 8, "mem-fraction-static": 0.8, "random-seed": 1, "chunked-prefill-size": 1024,
        # A rank that waits in vain for another one shows where, with py-spy; by default only after five minutes.
        "sleep-on-idle": None, "watchdog-timeout": 90,
    }  # fmt: skip
    if options.device == "cuda":
        # FlashInfer's fused all-reduce would use multicast; graphs of other sizes are not asked for here.
        common |= {
            "attention-backend": options.attention_backend, "enforce-disable-flashinfer-allreduce-fusion": None,
            "disable-prefill-cuda-graph": None, "cuda-graph-max-bs-decode": 8, "mm-attention-backend": "triton_attn",
        }  # fmt: skip
    drafting = SPECULATIVE | {"speculative-draft-model-path": str(draft)} if arm.draft else {}
    return common | drafting | arm.flags


def environment(bench: Bench, arm: Arm) -> dict[str, str]:
    """Return what a server's environment has more: its drafts are really verified."""
    # The processor's code is copied there; servers that start beside each other would find half of it.
    modules = bench.scratch / "modules" / arm.name.replace(" ", "-")
    return {"SGLANG_SIMULATE_ACC_LEN": "-1", "HF_MODULES_CACHE": str(modules)} | ENVIRON.get(arm.backend, {})


def _next(bench: Bench, pending: list[Arm], until: float) -> Arm | None:
    """Return a server that is up, or will not be, and whose plain one was asked; a slow start holds up nobody else."""
    plain = {(arm.model, arm.backend) for arm in pending if not arm.draft}
    for arm in pending:
        server = bench.servers[arm.name]
        settled = server.process.poll() is not None or time.monotonic() > until or server.is_ready()
        if settled and not (arm.draft and (arm.model, arm.backend) in plain):
            return arm
    return None


def _arm(bench: Bench, arm: Arm, known: Known) -> Record:
    """Have a server answer, and say how it went."""
    server = bench.servers[arm.name]
    row: Record = {"state": "did not start", "lossless": False}
    try:
        bench.wait(arm.name, seconds=1)
        row["state"] = "did not serve"
        row |= _answers(bench, arm, known)
    except Exception as error:  # a server that dies shows itself by whatever its client sees
        row["reason"] = last_words(server.log) or f"{type(error).__name__}: {error}"
    row["rebalances"] = len(REBALANCED.findall(server.log.read_text(errors="replace")))
    row["ready_s"] = server.ready_s
    if "eplb" in arm.name and row["state"] == "served" and not row["rebalances"]:
        row |= {"lossless": False, "reason": "no rebalance happened"}
    return row


def _answers(bench: Bench, arm: Arm, known: Known) -> Record:
    """Ask the same twice, a rebalance comes between, and compare with the server without speculation."""
    options, server = bench.options, bench.servers[arm.name]
    prompts = greedy.Prompts(options.prompts, options.answer, kimi.TEXT["vocab_size"])
    alone = [] if arm.draft else greedy.reference(server, prompts)
    found = [greedy.ask(server, prompts, 4) for _ in range(2)]
    if arm.draft and (arm.model, arm.backend) not in known:
        return {"state": "served", "reason": "there are no answers of a plain server to compare with"}
    answers, near = known[arm.model, arm.backend] if arm.draft else (alone, math.inf)
    first, again = (greedy.compare(answers, both, prompts.vocabulary, max(near, greedy.NEAR_ULP)) for both in found)
    if not arm.draft:
        known[arm.model, arm.backend] = alone, max(first["farthest_ulp"], again["farthest_ulp"])
    lossless = first["lossless"] and again["lossless"]
    return {"state": "served", "first": first, "again": again, "lossless": lossless}


def absent(module: str) -> str:
    """Return why a module cannot be imported, or nothing; a child tries, since an import can end a process."""
    if not module:
        return ""
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return "not installed"
    except (ImportError, ValueError) as error:
        return f"not installed: {error}"
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"cannot be imported: {done.stderr.strip().splitlines()[-1:]}"


def line(record: Record) -> str:
    """Return what was found in one line."""
    said = []
    for name, row in record.get("arms", {}).items():
        moved = f", {row['rebalances']} rebalances" if row["rebalances"] else ""
        tokens = greedy.said(row["again"]) if "again" in row else str(row.get("reason", ""))[:80]
        said.append(f"{name}: {row['state']}, {tokens}{moved}")
    return "; ".join(said)
