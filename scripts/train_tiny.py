"""Train, or evaluate, the bundled EAGLE-3 pair (a byte-level Llama target and its draft).

    python scripts/train_tiny.py --preset gpu --out sglang_bw/models/tiny_pair      minutes on one GPU
    python scripts/train_tiny.py --preset cpu --out DIRECTORY                       under an hour on two CPU cores
    python scripts/train_tiny.py --evaluate --out sglang_bw/models/tiny_pair        measures a pair that is there
    python scripts/train_tiny.py --card --out sglang_bw/models/tiny_pair            renders the card again

Needs torch, transformers, tokenizers, safetensors and numpy. Writes OUT/target, OUT/draft, OUT/prompts.jsonl,
OUT/training.json (settings, losses, measurements) and the card, OUT/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import card, checkpoint, evaluate
from tiny.corpus import training_rows
from tiny.draft import build_draft, train_draft
from tiny.prompts import heldout_documents, heldout_prompts
from tiny.settings import PRESETS, Settings
from tiny.target import build_target, rollouts, train_target

RECORD = "training.json"
PROMPTS = 48
TOKENS = 128
DOCUMENTS = 200
LOWEST, HIGHEST = 0.6, 2.0
"""Bits per byte on held-out text: below is a memorised loop, above is a target that did not learn."""


def main() -> int:
    args = _parser().parse_args()
    if args.card:
        _write(args.out / "README.md", card.render(json.loads((args.out / RECORD).read_text(encoding="utf-8"))))
        return 0
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and args.threads:
        torch.set_num_threads(args.threads)
    if args.evaluate:
        print(json.dumps(_evaluate(args.out, args.seed, device), indent=2))
        return 0
    preset = args.preset or ("gpu" if device.type == "cuda" else "cpu")
    record = _train(PRESETS[preset], preset, args.seed, device, args.out) | _evaluate(args.out, args.seed, device)
    _write(args.out / RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    _write(args.out / "README.md", card.render(record))
    print(json.dumps(record, indent=2, ensure_ascii=False))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the pair")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: gpu with a GPU, else cpu")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--device", help="torch device; default cuda if there is one")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default torch's choice")
    parser.add_argument("--evaluate", action="store_true", help="measure the pair in OUT, train nothing")
    parser.add_argument("--card", action="store_true", help="render OUT/README.md from OUT/training.json")
    return parser


def _train(settings: Settings, preset: str, seed: int, device: torch.device, out: Path) -> dict[str, Any]:
    begun = time.monotonic()
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    workers = min(16, os.cpu_count() or 1)
    rows = training_rows(settings.target_steps * settings.target_batch, settings.target_row + 1, seed, workers)
    _log(f"text: {rows.size / 1e6:.1f} M tokens, {time.monotonic() - begun:.0f} s")
    model = build_target()
    train_bits = train_target(model, rows, settings, device, _log)
    checkpoint.save_target(model.to(torch.bfloat16), out / "target")
    target = checkpoint.load_target(out / "target").to(device).requires_grad_(False)
    bits = evaluate.bits_per_byte(target, heldout_documents(DOCUMENTS, seed))
    _log(f"held-out text: {bits:.4f} bits per byte")
    if preset != "smoke" and not LOWEST <= bits <= HIGHEST:
        raise SystemExit(f"train_tiny: {bits:.2f} bits per byte on held-out text; a draft for this target is no use")

    prompts = training_rows(settings.rollout_batches * settings.rollout_rows, settings.rollout_row, seed + 1, workers)
    written = rollouts(target, prompts, settings, device, _log)
    text = torch.from_numpy(prompts[: len(prompts) // 4].astype("int64"))
    draft = build_draft(target)
    loss, match = train_draft(draft, target, torch.cat([written, text]), settings, device, _log)
    checkpoint.save_draft(draft, out / "draft")
    return {
        "command": f"python scripts/train_tiny.py --preset {preset} --seed {seed}",
        "seed": seed,
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "settings": asdict(settings),
        "seconds": round(time.monotonic() - begun),
        "target_train_bits_per_byte": round(train_bits, 4),
        "draft_loss_per_step": [round(x, 4) for x in loss],
        "draft_agreement_per_step": [round(x, 4) for x in match],
    }


def _evaluate(out: Path, seed: int, device: torch.device) -> dict[str, Any]:
    target = checkpoint.load_target(out / "target").to(device)
    draft = checkpoint.load_draft(out / "draft").to(device)
    prompts = heldout_prompts(PROMPTS, seed)
    lines = [json.dumps({k: v for k, v in asdict(p).items() if v}, ensure_ascii=False) for p in prompts]
    _write(out / "prompts.jsonl", "\n".join(lines) + "\n")
    runs = evaluate.greedy_runs(target, [p.prompt for p in prompts], TOKENS)
    samples = [bytes(t for t in run.output if t < 256).decode(errors="replace") for run in runs]
    for prompt, sample in zip(prompts, samples, strict=True):
        _log(f"--- {prompt.id}\n{prompt.prompt}[[{sample}]]")
    return {
        "heldout_bits_per_byte": round(evaluate.bits_per_byte(target, heldout_documents(DOCUMENTS, seed)), 4),
        "prompts": len(prompts),
        "max_new_tokens": TOKENS,
        "outputs_of_full_length": sum(len(r.output) == TOKENS for r in runs),
        "outputs_that_loop": sum(evaluate.loops(r.output) for r in runs),
        "accept_length_eagle3": round(evaluate.eagle_accept_length(target, draft, runs), 3),
        "accept_length_random_draft": round(
            evaluate.eagle_accept_length(target, checkpoint.random_draft().to(device), runs), 3
        ),
        "accept_length_prompt_lookup": round(evaluate.lookup_accept_length(runs), 3),
        "accept_length_ngram_cache": round(evaluate.ngram_accept_length(runs), 3),
    }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _log(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
