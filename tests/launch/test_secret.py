"""Keys: where they come from, how the engine gets them, and that nobody else sees them."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.cli import cli
from sglang_bw.errors import ApiKeyError
from sglang_bw.launch import secret
from sglang_bw.launch.keeper import REDACTED, Redactor
from sglang_bw.recipes import flags
from tests.launch.serving import Serve, until

KEY = "k3y-0123456789abcdef"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SGLANG_BW_LEDGER", str(tmp_path / "ledger.sqlite3"))
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    return tmp_path / "state" / "sglang-bw"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def seen_by_others(root: psutil.Process) -> Iterator[str]:
    """Yield what `ps` shows of a process and its descendants."""
    for process in [root, *root.children(recursive=True)]:
        yield " ".join(process.cmdline())


def everything_below(folder: Path) -> str:
    return "".join(path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("way", ["file", "environment", "engine flag", "config of the user"])
def test_only_the_engine_gets_the_key(
    serve: Serve, key_file: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    options: tuple[str, ...] = ("--api-key-file", str(key_file))
    if way == "environment":
        monkeypatch.setenv(secret.VARIABLE, KEY)
        options = ()
    elif way == "engine flag":  # the user's own line shows it then, the engine's does not
        options = ("--", "--api-k", KEY)
    elif way == "config of the user":
        theirs = tmp_path / "theirs.yaml"
        theirs.write_text(f"api_key: {KEY}\nrandom-seed: 7\n")
        options = ("--", "--config", str(theirs))
    serve.start("--json", *options)
    serve.until_ready()
    private = next((state / "private").iterdir())
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    config = private / secret.CONFIG
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert not (private / secret.REDACT).exists()
    document = yaml.safe_load(config.read_text())
    assert document["api-key"] == KEY
    assert document.get("random-seed") == (7 if way == "config of the user" else None)

    engine = psutil.Process(serve.pids[0])
    assert not [line for line in seen_by_others(engine.parent()) if KEY in line]
    assert secret.VARIABLE not in engine.environ()
    url = f"http://127.0.0.1:{serve.port}"
    assert httpx.get(f"{url}/server_info", trust_env=False).status_code == 401
    answer = httpx.get(f"{url}/server_info", trust_env=False, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200

    log = serve.log.read_text()
    assert "{'api_key': '<redacted>'}, cut <redacted>\n" in log
    assert log.splitlines()[0].endswith("--config API-KEY.yaml")
    serve.send(signal.SIGTERM)
    assert serve.wait() == 0
    assert not list((state / "private").iterdir())
    exported = subprocess.run(
        [sys.executable, "-m", "sglang_bw", "ledger", "export", "--json"], capture_output=True, text=True, check=False
    )
    shown = serve.out + serve.err + log + exported.stdout + everything_below(state)
    assert '"accept_length": 3.2' in serve.out
    assert KEY not in shown
    assert KEY.encode() not in (tmp_path / "ledger.sqlite3").read_bytes()


def test_the_key_file_goes_when_everything_is_killed(serve: Serve, key_file: Path, state: Path) -> None:
    serve.start("--api-key-file", str(key_file), mode="hangs")
    serve.until_loading()
    assert list((state / "private").iterdir())
    serve.send(signal.SIGKILL)
    serve.wait()
    until(lambda: not list((state / "private").iterdir()), what="the keeper removes the key")
    serve.assert_nothing_left()


def test_the_key_file_goes_when_the_keeper_is_killed(serve: Serve, key_file: Path, state: Path) -> None:
    serve.start("--api-key-file", str(key_file), mode="hangs")
    serve.until_loading()
    [private] = (state / "private").iterdir()
    assert (private / secret.CONFIG).exists()
    keeper = psutil.Process(serve.pids[0]).parent()
    assert keeper.pid != serve.process.pid
    keeper.kill()
    assert serve.wait() == 34
    assert not private.exists()


def test_what_a_killed_keeper_left_goes_at_the_next_start(state: Path) -> None:
    left = state / "private" / f"{2**22 + 1}-abc"  # above the largest pid of Linux
    left.mkdir(parents=True)
    made = secret.private(flags.parse(["--api-key", KEY]))
    assert made is not None
    assert not left.exists()
    assert made.config.exists()


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_dry_run_shows_no_key(key_file: Path, as_json: tuple[str, ...]) -> None:
    done = CliRunner().invoke(
        cli, ["serve", "tiny", "--device", "cpu", "--dry-run", "--api-key-file", str(key_file), *as_json]
    )
    assert done.exit_code == 0, done.output
    assert KEY not in done.output
    line = json.loads(done.stdout)["argv"] if as_json else done.stdout.splitlines()[0].split()
    assert line[-2:] == ["--config", "API-KEY.yaml"]
    assert "the line `api-key: KEY`;" in done.stderr


def test_a_dry_run_names_every_secret_of_the_file() -> None:
    engine_flags = ["--", "--admin-api-key", KEY, "--ssl-keyfile-password", KEY]
    done = CliRunner().invoke(cli, ["serve", "tiny", "--device", "cpu", "--dry-run", *engine_flags])
    assert "the lines `admin-api-key: KEY` and `ssl-keyfile-password: VALUE`;" in done.stderr
    assert KEY not in done.output


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"\n \n", "is empty", id="blank"),
        pytest.param(b"-key", "begins with a dash", id="like a flag"),
        pytest.param(b"two words", "more than one word", id="two words"),
        pytest.param(b"one\ntwo\n", "more than one word", id="two lines"),
        pytest.param("schl\u00fcssel".encode(), "printable ASCII", id="not ASCII"),
        pytest.param(b"\xff\xfe", "it is no text", id="no text"),
    ],
)
def test_what_is_no_key(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ApiKeyError, match=says):
        secret.api_key(path, {})


def test_the_file_wins_over_the_environment(key_file: Path) -> None:
    assert secret.api_key(key_file, {secret.VARIABLE: "other"}) == KEY
    assert secret.api_key(None, {secret.VARIABLE: " other\n"}) == "other"
    assert secret.api_key(None, {}) is None
    with pytest.raises(ApiKeyError, match="cannot be read"):
        secret.api_key(key_file.parent / "none", {})


def test_a_key_that_others_may_read_is_told_of(key_file: Path) -> None:
    key_file.chmod(0o644)
    done = CliRunner().invoke(cli, ["serve", "tiny", "--device", "cpu", "--dry-run", "--api-key-file", str(key_file)])
    assert f"chmod 600 {key_file}" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("name", ["api-key", "api-k", "api", "admin-api-key", "admin", "ssl-keyfile-password"])
def test_abbreviations_are_secret_too(name: str) -> None:
    line = flags.parse([f"--{name}", KEY, "--ssl-keyfile", "f.pem", "--port", "1"])
    assert flags.tokens(secret.public(line)) == ["--ssl-keyfile", "f.pem", "--port", "1"]
    assert list(secret.of(line).values()) == [KEY]


WORDS = st.lists(st.text("ab>", min_size=1, max_size=5), min_size=1, max_size=3)


@given(words=WORDS, pieces=st.lists(st.text("abx\n", max_size=6)))
def test_no_way_of_cutting_a_stream_lets_a_word_through(words: list[str], pieces: list[str]) -> None:
    redactor = Redactor([word.encode() for word in words])
    out = b"".join(redactor.feed(piece.encode()) for piece in pieces) + redactor.feed(b"", last=True)
    rest = out.replace(REDACTED, b"|")
    assert not [word for word in words if word.encode() in rest]


@given(word=st.text("ab", min_size=1, max_size=4), pieces=st.lists(st.text("abx\n", max_size=6)))
def test_a_stream_comes_out_as_a_whole_file_would(word: str, pieces: list[str]) -> None:
    redactor = Redactor([word.encode()])
    out = b"".join(redactor.feed(piece.encode()) for piece in pieces) + redactor.feed(b"", last=True)
    assert out == "".join(pieces).encode().replace(word.encode(), REDACTED)


def test_what_cannot_begin_a_word_goes_out_at_once() -> None:
    redactor = Redactor([b"secret"])
    assert redactor.feed(b"Load weight begin\n") == b"Load weight begin\n"
    assert redactor.feed(b"the sec") == b"the "
    assert redactor.feed(b"ond") == b"second"


def test_a_secret_like_a_flag_is_refused() -> None:
    with pytest.raises(ApiKeyError, match="the api-key begins with a dash"):
        secret.private(flags.parse(["--api-key=-x"]))


def test_the_user_s_config_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("- a\n")
    with pytest.raises(ApiKeyError, match="no YAML mapping"):
        secret.given_by_config(str(path))
