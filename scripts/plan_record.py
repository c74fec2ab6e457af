"""Compare what `plan` says of the KV pool with what real starts on one GPU come to.

    python scripts/plan_record.py --out record.json [--cases llama-8b llama-8b-eagle3 mla-moe]

For each case a model with random weights is made from a config.json (`--load-format dummy`; nothing is downloaded),
the installed engine is started with it, and the KV tokens of its /server_info are compared with three predictions:

- plan: from config.json and the board's name alone, every default restated;
- resolved: the same with the settings that the engine itself resolved;
- given free: with the memory that the engine's log says was free before and after the load.

With --device cpu the bundled pair is started instead and only the last one is compared: a rehearsal of this script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
from record.servers import Server, free_port, spawn
from rich.console import Console
from rich.table import Table

from sglang_bw.errors import UnknownBoardError
from sglang_bw.host.boards import Board, find
from sglang_bw.plan import checkpoint, fraction, memory, releases, settings
from sglang_bw.plan.shapes import Parallel

console = Console(highlight=False, width=140)
GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "sglang_bw" / "models" / "tiny_pair"

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DRAFT = {
    **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
}  # fmt: skip
MLA_MOE = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 4096,
    "moe_intermediate_size": 768, "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 32768,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False, "num_nextn_predict_layers": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CHAIN = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One start.

    :ivar asked: flags by the engine's field names, those of the model not among them.
    """

    name: str
    target: dict[str, Any] | Path
    draft: dict[str, Any] | Path | None = None
    asked: dict[str, Any] = field(default_factory=dict)


CASES = {
    case.name: case
    for case in (
        Case("llama-8b", LLAMA),
        Case("llama-8b-eagle3", LLAMA, DRAFT, CHAIN),
        Case("mla-moe", MLA_MOE),
        Case("mla-moe-fp8", MLA_MOE, None, {"kv_cache_dtype": "fp8_e4m3", "mem_fraction_static": 0.6}),
    )
}
REHEARSAL = Case("tiny", TINY / "target", TINY / "draft", {**CHAIN, "mem_fraction_static": 0.05})


def main() -> int:
    """Run the cases one after another; one that fails costs no other."""
    options = parse()
    scratch = Path(tempfile.mkdtemp(prefix="plan-record-", dir=options.scratch))
    cases = [REHEARSAL] if options.device == "cpu" else [CASES[name] for name in options.cases]
    board = None if options.device == "cpu" else this_board()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "engine": metadata.version("sglang"),
        "board": board.name if board else "CPU",
        "memory_mib": board.memory_mib if board else None,
        "cases": {},
    }
    failed = False
    for number, case in enumerate(cases, 1):
        console.print(f"{number} of {len(cases)}: {case.name} ...")
        try:
            record["cases"][case.name] = run(case, board, options, scratch)
        except Exception as error:  # the record of the others is worth more than this trace
            failed = True
            record["cases"][case.name] = {"failed": f"{type(error).__name__}: {error}"}
            console.print(record["cases"][case.name]["failed"], markup=False)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    report(record)
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal of this script")
    parser.add_argument("--scratch", type=Path, help="where a folder for models and logs is made")
    parser.add_argument("--start-limit", type=float, default=300, metavar="SECONDS", help="wait so long for a start")
    return parser.parse_args()


def this_board() -> Board:
    """Return the first GPU of this machine; one that has no name here is described by what nvidia-smi says."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, mib, capability = (part.strip() for part in answer.split(","))
    arch = "sm" + capability.replace(".", "")
    with contextlib.suppress(UnknownBoardError):
        known = find(name)
        if known.memory_mib == int(mib):
            return known
    return Board(name, arch, int(mib), source="nvidia-smi of this machine")


def run(case: Case, board: Board | None, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Start one case and compare."""
    target, draft = folder(case.target, scratch / case.name), folder(case.draft, scratch / f"{case.name}-draft")
    with started(case, target, draft, options, scratch) as server:
        told = httpx.get(f"http://127.0.0.1:{server.port}/server_info", timeout=30, trust_env=False).json()
    log = server.log.read_text(errors="replace")
    before, after = free(log)
    release = releases.parse(metadata.version("sglang"))
    model = checkpoint.read(str(target))
    other = checkpoint.read(str(draft)) if draft else None
    weights = memory.Weights(model.inventory, other.inventory if other else None)
    shapes = (model.shape, other.shape if other else None)
    resolved = settings.from_resolved(told, release, context=model.shape.context)
    place = board or Board("CPU", "sm120", int(before * 1024))
    given = memory.ledger(
        *shapes, place, Parallel(), resolved, weights=weights,
        free_start=int(before * GIB), free_after_load=int(after * GIB),
    )  # fmt: skip
    found = {
        "flags": case.asked,
        "tokens": told["max_total_num_tokens"],
        "mem_fraction_static": told["mem_fraction_static"],
        "free_start_gib": before,
        "free_after_load_gib": after,
        "given free": {"tokens": given.kv_tokens, "cell": given.cell.full + given.cell.draft},
    }
    if board:
        made = memory.ledger(*shapes, board, Parallel(), resolved, weights=weights)
        restated = fraction.restate(case.asked, *shapes, board, Parallel(), release)
        whole = memory.ledger(*shapes, board, Parallel(), restated, weights=weights)
        for name, ledger in (("plan", whole), ("resolved", made)):
            found[name] = {
                "tokens": ledger.kv_tokens,
                "mem_fraction_static": ledger.settings.mem_fraction_static,
                "free_start_gib": round(ledger.free_start / GIB, 2),
                "free_after_load_gib": round(ledger.free_after_load / GIB, 2),
                "verdict": ledger.verdict,
            }
    found["pools"] = re.findall(r"(?:KV Cache is allocated|KV size|Capture .*graph end)[^\n]{0,160}", log)[:8]
    return found


def folder(model: dict[str, Any] | Path | None, place: Path) -> Path | None:
    """Return a model's directory; one that is only a configuration is written."""
    if model is None or isinstance(model, Path):
        return model
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(model))
    return place


@contextlib.contextmanager
def started(
    case: Case, target: Path, draft: Path | None, options: argparse.Namespace, scratch: Path
) -> Iterator[Server]:
    """Start the engine; it is gone afterwards."""
    asked: dict[str, Any] = {"model_path": target, "device": options.device, "skip_tokenizer_init": True, **case.asked}
    if draft:
        asked["speculative_draft_model_path"] = draft
    if isinstance(case.target, dict):
        asked["load_format"] = "dummy"
    words = [(f"--{name.replace('_', '-')}", value) for name, value in asked.items()]
    tokens = [word for flag, value in words for word in ((flag,) if value is True else (flag, str(value)))]
    port, log = free_port(), scratch / f"{case.name}.log"
    command = [sys.executable, "-P", "-m", "sglang.launch_server", *tokens, "--port", str(port)]
    environ = dict(os.environ) | ({"SGLANG_USE_CPU_ENGINE": "1"} if options.device == "cpu" else {})
    server = Server(case.name, spawn(command, environ, log, log), port, log, time.monotonic())
    try:
        while not server.is_ready():
            if server.process.poll() is not None or time.monotonic() - server.began > options.start_limit:
                raise RuntimeError(f"the engine did not start: {log.read_text(errors='replace')[-1500:]}")
            time.sleep(1)
        yield server
    finally:
        server.stop()


def free(log: str) -> tuple[float, float]:
    """Return the memory free before the first load and after the last, in GiB, as the engine logs them."""
    before = re.search(r"Load weight begin\. avail mem=([\d.]+) GB", log)
    after = re.findall(r"Load weight end\.[^\n]*?avail mem=([\d.]+) GB", log)
    if not before or not after:
        raise RuntimeError("the engine's log does not say how much memory was free around the load")
    return float(before[1]), float(after[-1])


def report(record: dict[str, Any]) -> None:
    """Print the short table."""
    console.print(f"{record['board']}, sglang {record['engine']}, {record['date']}")
    table = Table("case", "KV tokens", "fraction", "plan", "resolved", "given free", box=None)
    for name, found in record["cases"].items():
        if "failed" in found:
            table.add_row(name, "failed")
            continue
        errors = [
            f"{found[kind]['tokens']:,} ({found[kind]['tokens'] / found['tokens'] - 1:+.2%})" if kind in found else "-"
            for kind in ("plan", "resolved", "given free")
        ]
        table.add_row(name, f"{found['tokens']:,}", f"{found['mem_fraction_static']:.4g}", *errors)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
