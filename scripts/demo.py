"""Serve the bundled EAGLE-3 pair, ask it through the OpenAI client, and compare with the run without speculation.

    python scripts/demo.py [--engine-tree DIRECTORY] [--questions 6] [--tokens 64]

Starts `sglang-bw serve tiny` twice, first with the draft and then with --no-spec, asks both the same questions at
temperature 0 one after another, and prints text, accept length, tokens per second and whether the tokens are equal.
Exit code 1 when they are not equal in fp32, which is what `tiny` computes in on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.table import Table

from sglang_bw import models

STOP_S = 60
console = Console(highlight=False)


@dataclass(frozen=True)
class Answers:
    """What one server said.

    ``dtype`` is what the engine computes in; ``tokens`` are the output token ids of each question; ``rounds`` and
    ``accepted`` are verify passes and accepted draft tokens over all of them, 0 without speculation.
    """

    dtype: str
    texts: list[str]
    tokens: list[list[int]]
    rounds: int
    accepted: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, one request at a time."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def accept_length(self) -> float | None:
        """Tokens that a verify pass emits on average, the bonus token included."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def main() -> int:
    """Run both servers and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-tree", help="an unpacked engine in place of the installed one")
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    options = parser.parse_args()
    began = time.monotonic()
    questions = read_questions(options.questions)
    tree = ["--engine-tree", options.engine_tree] if options.engine_tree else []
    with serving(*tree) as url:
        drafted = ask(url, questions, options.tokens)
    with serving("--no-spec", *tree) as url:
        plain = ask(url, questions, options.tokens)
    return report(questions, drafted, plain, time.monotonic() - began)


def read_questions(count: int) -> list[str]:
    """Return questions that training never saw."""
    rows = map(json.loads, models.TINY_PROMPTS.read_text(encoding="utf-8").splitlines())
    return [row["messages"][0]["content"] for row in rows if "messages" in row][:count]


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """Run `serve tiny` and yield its URL; its own messages go to the terminal."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang_bw", "serve", "tiny", "--json", "--port", str(port), *options]
    console.print(f"[bold]$ sglang-bw {' '.join(command[3:])}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        events = {}
        for line in process.stdout:
            event = json.loads(line)
            events[event["event"]] = event
            if event["event"] == "warm-up":
                break
        if "warm-up" not in events:
            raise SystemExit(process.wait())
        url = events["ready"]["url"]
        console.print(f"ready in {sum(events['ready']['seconds'].values()):.0f} s: {url}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(url: str, questions: list[str], tokens: int) -> Answers:
    """Ask every question once, after one unmeasured round."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    _ask_one(client, questions[0], tokens)
    began = time.monotonic()
    choices = [_ask_one(client, question, tokens) for question in questions]
    seconds = time.monotonic() - began
    meta = [choice.meta_info for choice in choices]
    return Answers(
        dtype=httpx.get(f"{url}/server_info", timeout=30, trust_env=False).json()["dtype"],
        texts=[choice.message.content or "" for choice in choices],
        tokens=[choice.response_token_ids for choice in choices],
        rounds=sum(info.get("spec_verify_ct", 0) for info in meta),
        accepted=sum(info.get("spec_num_correct_drafts", 0) for info in meta),
        seconds=seconds,
    )


def _ask_one(client: openai.OpenAI, question: str, tokens: int) -> Any:
    # The two extra fields are SGLang's own: accept length and token ids are no part of the OpenAI protocol.
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=tokens,
        extra_body={"return_meta_info": True, "return_token_ids": True},
    ).choices[0]


def report(questions: list[str], drafted: Answers, plain: Answers, seconds: float) -> int:
    """Print texts and numbers; return the exit code."""
    for question, text in zip(questions, drafted.texts, strict=True):
        console.print(f"\n[bold]{question}", f"  {text.strip()}", sep="\n")
    table = Table("", "accept length", "tok/s", box=None, padding=(0, 3, 0, 0))
    table.add_row("EAGLE-3", f"{drafted.accept_length or 1:.2f}", f"{drafted.tokens_per_second:.1f}")
    table.add_row("no speculation", "1", f"{plain.tokens_per_second:.1f}")
    console.print("", table)
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    equal = drafted.tokens == plain.tokens
    count = sum(map(len, drafted.tokens))
    console.print(f"speculation is {ratio:.2f} times as fast here, one request at a time; {seconds:.0f} s in all")
    console.print(f"tokens equal: {'yes' if equal else 'NO'} ({count} tokens, {len(questions)} answers, {plain.dtype})")
    if not equal:
        console.print(first_difference(drafted, plain))
    # In 16 bits two logits can be equal up to rounding, and then both tokens are right; in fp32 there is no excuse.
    return 0 if equal or plain.dtype != "float32" else 1


def first_difference(drafted: Answers, plain: Answers) -> str:
    """Say where the first answer that differs does so."""
    pairs = zip(drafted.tokens, plain.tokens, strict=True)
    answer, (left, right) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    common = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return f"answer {answer} differs from token {common + 1} on"


if __name__ == "__main__":
    sys.exit(main())
