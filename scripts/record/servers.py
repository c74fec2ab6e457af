"""Servers of the measurement: engines with random weights, and `sglang-bw serve tiny`, side by side on one GPU."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

Answer = dict[str, Any]
Record = dict[str, Any]

ACCEPT_LENGTH = 3
_PR_SET_PDEATHSIG = 1
CHAIN = {"speculative-num-steps": 3, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4}
TREE = ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"]
SHAPES = {
    "8b": {"size": 4096, "ff": 14336, "heads": 32, "kv": 8, "layers": 32, "vocab": 128256, "draft_vocab": 32000},
    # Half of it on each of two GPUs is what a rank of a large model reads: rounds that the device takes, not the host.
    "32b": {"size": 5120, "ff": 27648, "heads": 40, "kv": 8, "layers": 64, "vocab": 128256, "draft_vocab": 32000},
    "small": {"size": 256, "ff": 512, "heads": 4, "kv": 2, "layers": 8, "vocab": 512, "draft_vocab": 128},
}


@dataclass
class Server:
    """A started server.

    :ivar events: where `serve --json` writes; ``None`` for an engine started directly.
    :ivar ready_s: seconds until it answered, ``None`` before.
    :ivar answer_s: seconds that an answer may take.
    """

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    began: float
    events: Path | None = None
    ready_s: float | None = None
    answer_s: float = 120.0

    def is_ready(self) -> bool:
        """Ask once, and remember when it was."""
        if self.ready_s is None and self._answers():
            self.ready_s = time.monotonic() - self.began
        return self.ready_s is not None

    def _answers(self) -> bool:
        if self.events:
            return '"event": "warm-up"' in self.events.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5, trust_env=False).status_code == 200
        return False

    def generate(self, tokens: int, **body: Any) -> Any:
        """POST /generate: greedy, exactly ``tokens`` tokens."""
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.port}/generate"
        response = httpx.post(url, json=body, timeout=self.answer_s, trust_env=False)
        response.raise_for_status()
        return response.json()

    def told(self) -> Record:
        """Return what it printed and logged that belongs into a record."""
        log = self.log.read_text(errors="replace")
        graphs = re.findall(r"Decode batch.*(?:cuda|cpu) graph: (True|False)", log)
        found: Record = {
            "ready_s": None if self.ready_s is None else round(self.ready_s, 1),
            "decode_batches_by_graph": {key: graphs.count(key) for key in ("True", "False")},
            "captures": [line[:200] for line in log.splitlines() if re.search(r"Capture .*graph end", line)],
        }
        if self.events:
            found["events"] = [json.loads(line) for line in self.events.read_text().splitlines()]
            found["printed"] = self.log.with_suffix(".err").read_text(errors="replace").splitlines()
        return found

    def stop(self) -> None:
        """End it and everything that it started."""
        for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(seconds)


def speed_flags(scratch: Path, device: str, shape: str) -> Record:
    """Return the flags that both engines get; ``None`` is a flag without a value."""
    target, draft = write_random_pair(scratch, SHAPES[shape])
    flags: Record = {
        "model-path": str(target), "speculative-draft-model-path": str(draft), "speculative-algorithm": "EAGLE3",
        **CHAIN, "load-format": "dummy", "skip-tokenizer-init": None, "device": device, "dtype": "bfloat16",
        # The servers share the GPU, and a pool is sized from what the others have left: so a fixed one.
        "max-total-tokens": 32768, "mem-fraction-static": 0.85, "max-running-requests": 32, "random-seed": 1,
    }  # fmt: skip
    return flags | ({"attention-backend": "triton", "cuda-graph-max-bs-decode": 32} if device == "cuda" else {})


def start_engine(name: str, tree: Path, flags: Record, scratch: Path, environ: dict[str, str] | None = None) -> Server:
    """Start an engine with a simulated accept length, with ``environ`` over the environment."""
    tokens = [word for key, value in flags.items() for word in (f"--{key}", *_words(value))]
    port, log = free_port(), scratch / f"{name}.log"
    command = [sys.executable, "-P", "-m", "sglang.launch_server", *tokens, "--port", str(port)]
    own = {"PYTHONPATH": str(tree), "SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH)} | (environ or {})
    if flags["device"] == "cpu":
        own["SGLANG_USE_CPU_ENGINE"] = "1"
    return Server(name, spawn(command, dict(os.environ) | own, log, log), port, log, time.monotonic())


def _words(value: Any) -> list[str]:
    """Return what stands behind a flag: nothing, one word, or the words of a list."""
    if value is None:
        return []
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]


def start_serve(
    name: str, options: list[str], engine_flags: list[str], scratch: Path, environ: dict[str, str] | None = None
) -> Server:
    """Start `sglang-bw serve tiny`, with ``environ`` over the environment."""
    port, log, events = free_port(), scratch / f"{name}.log", scratch / f"{name}.events"
    log.write_text("")
    command = [
        *(sys.executable, "-m", "sglang_bw", "serve", "tiny", "--json", "--port", str(port), "--log", str(log)),
        *options,
        *("--", *engine_flags, "--decode-log-interval", "4"),
    ]
    process = spawn(command, dict(os.environ) | (environ or {}), events, scratch / f"{name}.err")
    return Server(name, process, port, log, time.monotonic(), events)


def wait_all(servers: list[Server], seconds: float) -> None:
    """Wait until each is ready or dead: a server that still loads would disturb the measurement."""
    deadline = time.monotonic() + seconds
    waiting = servers
    while waiting and time.monotonic() < deadline:
        time.sleep(0.5)
        waiting = [server for server in waiting if not server.is_ready() and server.process.poll() is None]
    if failed := [server for server in servers if not server.ready_s]:
        for server in failed:
            server.stop()
        tails = [f"{server.name}:\n{server.log.read_text(errors='replace')[-2000:]}" for server in failed]
        raise RuntimeError("not ready:\n" + "\n".join(tails))


def keep_apart(servers: list[Server]) -> list[list[int]]:
    """Give each running server cores of its own, an equal share of this process's; return them.

    Rounds whose host takes longer than their graphs show what else ran on the same cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(servers)
    if not share:
        return [cores] * len(servers)
    found = [cores[number * share : (number + 1) * share] for number in range(len(servers))]
    for server, own in zip(servers, found, strict=True):
        root = psutil.Process(server.process.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, own)
    return found


def accept_length(answers: list[Answer]) -> float:
    """Tokens that a verify pass emits on average, the bonus token included; 1 without speculation."""
    rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    return 1 + sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in answers) / max(rounds, 1)


def spawn(command: list[str], environ: dict[str, str], out: Path, err: Path) -> subprocess.Popen[bytes]:
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Appending, so that both may name one file.
    with out.open("ab") as out_file, err.open("ab") as err_file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file, env=environ, start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )  # fmt: skip


def _die_with(parent: int) -> Callable[[], None]:
    """Let the kernel kill the server with this process: after a time limit nobody is left to stop it.

    The engine's own processes ask for the same, so the whole server goes.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)

    return ask


def free_port() -> int:
    while True:
        port = 20000 + secrets.randbelow(10000)  # below those that the system hands out by itself
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def write_random_pair(folder: Path, shape: dict[str, int]) -> tuple[Path, Path]:
    # Configurations without weights: the engine fills in random ones (`--load-format dummy`).
    common = {
        "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "hidden_size": shape["size"], "intermediate_size": shape["ff"],
        "num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv"],
        "head_dim": shape["size"] // shape["heads"], "vocab_size": shape["vocab"], "rope_theta": 500000.0,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": shape["layers"]}
    draft = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": shape["draft_vocab"],
    }
    folders = folder / "random-target", folder / "random-draft"
    for path, own in zip(folders, (target, draft), strict=True):
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(common | own, indent=1))
    return folders
