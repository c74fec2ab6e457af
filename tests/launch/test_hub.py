"""`serve` of models on a hub: what is fetched, what is refused before anything is, and what an interrupt leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_bw.launch import hub
from sglang_bw.launch.hub import Wanted
from tests.launch import fake_hub
from tests.launch.fake_hub import COMMIT, Hub
from tests.launch.serving import DEADLINE_S, Serve, alive, free_port, until

MODEL = ("--model-path", "org/model", "--draft", "org/draft", "--no-warmup")


@pytest.fixture
def served(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a target and a draft, and an empty cache."""
    with fake_hub.running() as running:
        running.add("org/model", model, pytorch_model__bin=b"copy", picture__png=b"picture", notes__md=b"text")
        running.add("org/draft", model)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield running


def snapshot(tmp_path: Path, name: str = "model") -> Path:
    return tmp_path / f"hf/hub/models--org--{name}/snapshots/{COMMIT}"


def stop(serve: Serve) -> None:
    serve.until_out("http://")
    serve.send(signal.SIGTERM)
    assert serve.wait() == 0


def test_fetches_what_the_engine_reads_and_nothing_twice(serve: Serve, served: Hub, tmp_path: Path) -> None:
    serve.start(*MODEL)
    stop(serve)
    assert "target org/model: 0.00 of 0.00 GB to fetch into" in serve.err
    assert "draft org/draft: " in serve.err
    names = {path.name for path in snapshot(tmp_path).iterdir()}
    assert {"config.json", "tokenizer.json", "model-00002-of-00002.safetensors"} <= names
    assert not names & {"pytorch_model.bin", "picture.png"}
    assert "--model-path org/model" in serve.log.read_text()
    served.requests.clear()
    serve.start(*MODEL)
    stop(serve)
    assert served.fetched() == []
    assert "to fetch" not in serve.err


def test_a_fetch_takes_none_of_a_unit_s_time(
    serve: Serve, served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        serve.start(*MODEL, "--startup-timeout", "100")
        told = []
        while not told or "READY=1" not in told[-1]:
            told.append(channel.recv(4096).decode())
        assert "EXTEND_TIMEOUT_USEC=300000000\nSTATUS=fetching the target org/model" in told
        load = told.index("EXTEND_TIMEOUT_USEC=160000000\nSTATUS=loading")
        assert not [state for state in told[load + 1 :] if "EXTEND" in state]
        stop(serve)


def refused(serve: Serve, *options: str, code: int) -> str:
    serve.pids_file.unlink(missing_ok=True)
    serve.start(*MODEL, *options)
    assert serve.wait() == code, serve.err
    assert not serve.pids
    assert "Traceback" not in serve.err
    return serve.err


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(serve: Serve, served: Hub) -> None:
    served.claimed["model-00001-of-00002.safetensors"] = 10**16
    said = refused(serve, code=64)
    assert "the target org/model: 10,000,000.0 GB are to be fetched" in said
    assert "also: the draft org/draft" in said
    assert "HF_HUB_CACHE=DIR" in said
    assert "--force" in said
    assert served.fetched() == []


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "no such model, private, or gated"), (403, "gated"), (404, "no such model"), (500, "answers 500")],
)
def test_a_hub_that_refuses_is_quoted(serve: Serve, served: Hub, status: int, says: str) -> None:
    served.status = status
    said = refused(serve, code=64)
    assert says in said
    assert "hf auth login" in said


def test_a_gated_model_is_told_by_its_first_file(serve: Serve, served: Hub) -> None:
    served.gated = True
    said = refused(serve, code=64)
    assert "the target org/model did not come: GatedRepoError" in said
    assert "hf auth login" in said


def test_without_a_hub_a_whole_cache_serves(serve: Serve, served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "the hub cannot be reached" in refused(serve, code=64)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    serve.start(*MODEL)
    stop(serve)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    serve.start(*MODEL)
    stop(serve)
    assert "the target org/model is taken from the cache" in serve.err


def test_offline_asks_nobody_and_names_what_is_missing(
    serve: Serve, served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve.start(*MODEL)
    stop(serve)
    served.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    serve.start(*MODEL)
    stop(serve)
    (snapshot(tmp_path, "draft") / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing (1 of 3 tensors)" in refused(serve, code=32)
    assert "HF_HUB_OFFLINE is set" in refused(serve, "--draft", "org/other", code=32)
    assert served.requests == []


def test_what_the_hub_serves_broken_is_not_loaded(serve: Serve, served: Hub) -> None:
    served.models["org/draft"]["model-00001-of-00002.safetensors"] += b"more"
    assert "is too long" in refused(serve, code=32)


def children(serve: Serve) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(serve.process.pid).children(recursive=True)
        if "sglang_bw.launch.fetch" in _command(child)
    ]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupt_ends_the_download_and_keeps_what_has_come(
    serve: Serve, served: Hub, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    big = b"\0" * (8 << 20)
    served.models["org/model"]["vocabulary.txt"] = big
    served.slow = 0.2
    serve.start(*MODEL)
    until(lambda: "vocabulary.txt" in served.fetched(), what="the large file begins to come")
    until(lambda: (snapshot(tmp_path) / "config.json").exists(), what="a small file is there")
    downloads = children(serve)
    assert downloads
    serve.send(number)
    assert serve.wait() == code
    until(lambda: not any(alive(child.pid) for child in downloads), what="the downloads end")
    served.slow = 0
    served.requests.clear()
    serve.start(*MODEL)
    stop(serve)
    assert "config.json" not in [line for line in served.fetched() if "model" in line]
    assert (snapshot(tmp_path) / "vocabulary.txt").read_bytes() == big


def test_a_fetch_that_was_ended_before_it_linked_a_file_goes_on(serve: Serve, served: Hub, tmp_path: Path) -> None:
    """The bytes of a file come first, then its name in the snapshot."""
    serve.start(*MODEL)
    stop(serve)
    (snapshot(tmp_path) / "tokenizer.json").unlink()
    served.requests.clear()
    serve.start(*MODEL)
    stop(serve)
    assert (snapshot(tmp_path) / "tokenizer.json").exists()
    assert served.fetched() == []  # not a byte of it


def test_the_cache_is_where_the_library_and_the_engine_look(tmp_path: Path) -> None:
    # In a process of its own: the library reads its environment once, and another test may have had it do so.
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    library = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(library).expanduser() == hub._cache(os.environ).expanduser()
    assert hub._cache({"HF_HUB_CACHE": "/a"}) == Path("/a")
    assert hub._cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hub._cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")


def test_nothing_of_an_empty_cache(tmp_path: Path) -> None:
    assert hub.cached(Wanted("target", "org/model", None, tmp_path)) is None
