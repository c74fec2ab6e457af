"""Run ``sglang-bw serve`` as users do, on a fake engine, and look at what it leaves."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.record import PatchRecord
from sglang_bw.fork.series import Series

HERE = Path(__file__).resolve().parent
PATCHES = HERE.parents[1] / "patches"
VERSION = "0.5.23+bw.1"
DEADLINE_S = 90.0


def until(condition: Callable[[], object], seconds: float = DEADLINE_S, what: str = "") -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ports() -> Iterator[int]:
    """Yield ports of this test process alone, each once: below those that the system hands out by itself."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    mine = range(20000 + int(worker.removeprefix("gw")), 30000, workers)
    first = secrets.randbelow(len(mine))
    yield from itertools.cycle([*mine[first:], *mine[:first]])


_PORTS = _ports()


def free_port() -> int:
    """Return a free port that no other test of this run gets, so that nobody takes it meanwhile."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


def write_safetensors(path: Path, names: list[str]) -> None:
    """Write four bytes of fp32 for every name, in the real format."""
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0\0\0" * len(names))


def write_model(directory: Path) -> Path:
    """Write a model directory that passes every check before the load: two shards with an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    shards = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
    for shard, names in shards.items():
        write_safetensors(directory / shard, names)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_recipe(path: Path, model: Path, requests: int = 16) -> None:
    """Write a recipe with the id ``mine``: EAGLE-3 in 3 steps, the model its own draft."""
    target = f"{{path: {model}}}"
    path.write_text(
        f"id: mine\ntitle: mine\nengine: {{sglang: '>=0.5.23,<0.5.24'}}\ntarget: {target}\ndraft: {target}\n"
        f"spec: {{algorithm: EAGLE3, steps: 3, topk: 1, draft_tokens: 4}}\nargs: {{max-running-requests: {requests}}}\n"
    )


def write_tree(tree: Path, *, patched: bool = True, without: str = "") -> Path:
    """Write an engine tree around the fake: with its record when patched, as upstream's when not.

    :param without: the topic of a patch that the record shall not have.
    """
    package = tree / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(HERE / "fake_engine.py", package / "launch_server.py")
    version = VERSION if patched else "0.5.23"
    files = {f"sglang/{path.name}": path.read_bytes() for path in package.iterdir()}
    if patched:
        record = {
            "version": version,
            "base": "0.5.23",
            "series": "bw.1",
            "tree": "0" * 40,
            "upstream": {"wheel": "sglang-0.5.23-py3-none-any.whl", "sha256": "0" * 64},
            "patches": [one.model_dump() for one in _patches() if one.topic != without],
            "files": {path: hashlib.sha256(data).hexdigest() for path, data in files.items()},
        }
        (package / "_bw.json").write_text(json.dumps(record))
        files["sglang/_bw.json"] = (package / "_bw.json").read_bytes()
    info = tree / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    rows = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    (info / "RECORD").write_text("".join(rows))
    return tree


def _patches() -> list[PatchRecord]:
    """Return the records of the newest series."""
    return [PatchRecord.of(read_patch(path)) for path in Series.load(PATCHES, "0.5.23").files]


def _hang_up_ends() -> None:
    """Under nohup it is ignored, by everything that is started there."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass
class Serve:
    """One ``sglang-bw serve`` in a process of its own."""

    tree: Path
    model: Path
    scratch: Path
    process: subprocess.Popen[str] = field(init=False)
    port: int = field(init=False)

    def start(self, *options: str, mode: str = "", port: int | None = None, **popen: object) -> Serve:
        self.port = port or free_port()
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FAKE_MODE": mode,
            "FAKE_PIDS": str(self.pids_file),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        before, dashes, after = options, (), ()
        if "--" in options:
            cut = options.index("--")
            before, dashes, after = options[:cut], ("--",), options[cut + 1 :]
        command = [sys.executable, "-m", "sglang_bw", "serve", "tiny", "--device", "cpu", "--port", str(self.port)]
        command += ["--model-path", str(self.model), "--draft", str(self.model), "--engine-tree", str(self.tree)]
        command += ["--log", str(self.log), *before, *dashes, *after]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.out_file.open("w"),
            env=environ,
            text=True,
            **{"stderr": self.err_file.open("w"), "preexec_fn": _hang_up_ends, **popen},  # type: ignore[call-overload]
        )
        return self

    @property
    def log(self) -> Path:
        return self.scratch / "engine.log"

    @property
    def out_file(self) -> Path:
        return self.scratch / "out.txt"

    @property
    def err_file(self) -> Path:
        return self.scratch / "err.txt"

    @property
    def pids_file(self) -> Path:
        return self.scratch / "pids.txt"

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    @property
    def pids(self) -> list[int]:
        """The engine's processes: main, two children, one daemon."""
        return [int(line) for line in self.pids_file.read_text().split()] if self.pids_file.exists() else []

    def until_log(self, text: str) -> None:
        until(lambda: self.log.exists() and text in self.log.read_text(), what=f"{text!r} in the log; {self.err}")

    def until_out(self, text: str) -> None:
        until(lambda: text in self.out or self.process.poll() is not None, what=f"{text!r} in {self.out!r}")
        assert text in self.out, f"{self.out}\n{self.err}"

    def until_loading(self) -> None:
        self.until_log("Load weight begin")
        until(lambda: len(self.pids) == 4, what="the engine's four processes")

    def until_ready(self) -> None:
        """Wait for the end of the warm-up; `ready` alone is an earlier line."""
        self.until_out("tokens_per_second" if "--json" in self.process.args else "tok/s")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def assert_nothing_left(self, seconds: float = DEADLINE_S) -> None:
        assert self.pids, "the engine never started"
        until(lambda: not any(map(alive, self.pids)), seconds, "the engine's processes are gone")

    def clean_up(self) -> None:
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
