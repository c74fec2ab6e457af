"""Run `sglang-bw ab` and `sglang-bw tune` on one GPU with random weights in the shape of an 8B Llama.

    python scripts/gpu_experiment.py --out DIRECTORY [--parts ab tune] [--limit 290] [--engine-tree DIRECTORY]

Nothing is downloaded: the engine makes up the weights, and the tokenizer is the bundled pair's with words that nobody
uses up to the size of the vocabulary. Acceptance is simulated (3 tokens a verify pass), so both results are marked: no
speeds that a user gets.

- ab: with against without an EAGLE-3 draft, both servers up at once, at 1 and 8 requests.
- tune: from decode graphs for batches up to 2 to larger ones, with 8 requests at a time.

What is measured shrinks to what is left of the limit. DIRECTORY gets the record of every comparison, the ledger with
the trials, the tuned recipe, the HTML report, the engines' logs and `summary.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from record.servers import ACCEPT_LENGTH, CHAIN, SHAPES, write_random_pair
from rich.console import Console

from sglang_bw import models

INVALID = 74
_LEAST_S = 30  # to measure in, however late it is
_BOUNDS = {"cuda": ("cuda-graph-max-bs-decode", 2, (8, 16)), "cpu": ("max-running-requests", 1, (4, 8))}
# Prompts, and tokens of an answer: a rehearsal is to end within the day.
_LOAD = {"cuda": ["--count", "8", "--max-tokens", "128"], "cpu": ["--count", "8", "--max-tokens", "24"]}
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the parts one after another; one that fails costs no other."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and what runs ends with it
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(options.out, options.device, options.shape)
    parts = {"ab": ab, "tune": tune}
    summary: dict[str, Any] = {"command": sys.argv}
    for number, name in enumerate(options.parts):
        left = options.limit - (time.monotonic() - began)
        summary[name] = parts[name](options, recipe, left / (len(options.parts) - number))
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if find_spec("vl_convert"):
        run(options, "ledger", "report", "-o", str(options.out / "report.html"))
    else:
        console.print("no report: vl-convert-python is not installed here; render it where it is, from ledger.sqlite3")
    return max(summary[name]["code"] for name in options.parts)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=_path, required=True, help="directory for everything that is written")
    parser.add_argument("--parts", nargs="+", choices=["ab", "tune"], default=["ab", "tune"])
    parser.add_argument("--limit", type=float, default=290, metavar="SECONDS", help="of the whole (290)")
    parser.add_argument("--start-s", type=float, default=45, metavar="SECONDS", help="that one start may take (45)")
    parser.add_argument("--engine-tree", type=_path, help="an unpacked patched wheel; the installed one if left out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal of this script")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b", help="of the random target")
    return parser.parse_args()


def _path(text: str) -> Path:
    return Path(text).resolve()


def ab(options: argparse.Namespace, recipe: Path, seconds: float) -> dict[str, Any]:
    """Compare with and without speculation in about so many seconds, two starts among them."""
    budget = max(_LEAST_S, seconds - 2 * options.start_s)
    name, _, larger = _BOUNDS[options.device]
    load = ["--concurrency", "1,8", "--within", "2%", "--budget", f"{budget:.0f}s", "--ignore-eos"]
    record = options.out / "ab.jsonl"
    record.unlink(missing_ok=True)
    arms = [str(recipe), "--no-spec", "--side-by-side", "--force", "--record", str(record), "--json"]
    done = run(options, "ab", *arms, *common(options), *load, "--", f"--{name}", str(larger[0]))
    found = {"code": 0 if done.returncode == INVALID else done.returncode, "valid": done.returncode == 0}
    if done.returncode in (0, INVALID):
        outcome = json.loads(done.stdout)["outcome"]
        found |= {"ratios": outcome["ratios"], "warnings": outcome["warnings"]}
        for one in outcome["ratios"]:
            told = f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}], R {one['round_cost'] or 0:.2f}"
            console.print(
                f"ab at {one['concurrency']}: {told}, {one['b']['tok_s']:.0f} tok/s against {one['a']['tok_s']:.0f}"
            )
    return found


def tune(options: argparse.Namespace, recipe: Path, seconds: float) -> dict[str, Any]:
    """Search the bound on batches in about so many seconds, a start a value and one of the recipe among them."""
    name, _, larger = _BOUNDS[options.device]
    trial = max(_LEAST_S, (seconds - (1 + len(larger)) * options.start_s) / len(larger))
    space = f"{name}={','.join(map(str, larger))}"
    load = ["--concurrency", "8", "--trials", str(len(larger))]
    times = ["--trial-budget", f"{trial:.0f}s", "--budget", f"{max(1, seconds - options.start_s - trial):.0f}s"]
    written = options.out / "tuned.yaml"
    search = [str(recipe), "--space", space, "--together", "--json", "-o", str(written), *common(options)]
    done = run(options, "tune", *search, *load, *times)
    found: dict[str, Any] = {"code": done.returncode}
    if done.returncode == 0:
        found |= json.loads(done.stdout)
        console.print(json.dumps(found["tried"], indent=1), markup=False)
        console.print(written.read_text() if found["best"] else "no winner", markup=False)
    return found


def common(options: argparse.Namespace) -> list[str]:
    """Return options of both commands: same prompts, this device, this engine."""
    tree = ["--engine-tree", str(options.engine_tree)] if options.engine_tree else []
    return ["--prompts", "tiny", *_LOAD[options.device], "--device", options.device, *tree]


def run(options: argparse.Namespace, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the tool; its ledger and its logs are below the output, its messages on the terminal."""
    own = {"SGLANG_BW_LEDGER": str(options.out / "ledger.sqlite3"), "XDG_STATE_HOME": str(options.out / "state")}
    console.print(f"$ sglang-bw {' '.join(command)}", markup=False)
    began = time.monotonic()
    arguments = [sys.executable, "-m", "sglang_bw", *command]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}, check=False)
    console.print(f"exit code {done.returncode} after {time.monotonic() - began:.0f} s")
    return done


def write_recipe(out: Path, device: str, shape: str) -> Path:
    """Write a pair without weights and its recipe; return the recipe's file."""
    target, draft = write_random_pair(out, SHAPES[shape])
    write_tokenizer(target, SHAPES[shape]["vocab"])
    name, small, _ = _BOUNDS[device]
    args = {
        "load-format": "dummy", "sleep-on-idle": True, "random-seed": 1, "decode-log-interval": 10,
        # Two servers share the GPU, and a pool is sized from what the other has left: so a fixed one.
        "max-total-tokens": 32768, "max-running-requests": 16,
    }  # fmt: skip
    if device == "cuda":
        # Prefill is not what is measured, and its graphs take most of a start.
        args |= {"dtype": "bfloat16", "attention-backend": "triton", "disable-prefill-cuda-graph": True}
    else:
        args |= {"dtype": "float32", name: small}
    recipe = {
        "id": f"random-{shape}",
        "title": "Random weights and simulated acceptance: no model, no real speed",
        "engine": {"sglang": ">=0.5.22"},
        "target": {"path": str(target)},
        "draft": {"path": str(draft), "kind": "mha"},
        "spec": {
            "algorithm": "EAGLE3",
            "steps": CHAIN["speculative-num-steps"],
            "topk": CHAIN["speculative-eagle-topk"],
            "draft_tokens": CHAIN["speculative-num-draft-tokens"],
        },
        "args": args,
        "memory": {"fraction": 0.85},
        "graphs": {"decode_max_bs": small} if device == "cuda" else {},
        "env": {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH)},
    }
    path = out / "random.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def write_tokenizer(target: Path, vocabulary: int) -> None:
    """Give the target a tokenizer for every id that random weights may answer with."""
    bundled = models.TINY_TARGET
    tokenizer = json.loads((bundled / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"unused{number}": number for number in range(len(words), vocabulary)}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_text((bundled / name).read_text())


if __name__ == "__main__":
    sys.exit(main())
