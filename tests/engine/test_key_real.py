"""A key with the real engine: it reads the file, asks for the key, and shows it to nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from click.testing import CliRunner

from sglang_bw import models
from sglang_bw.cli import cli
from sglang_bw.launch.deploy import deployment
from tests.conftest import EngineTrees, engine_environment, engine_trees_of
from tests.engine.conftest import RunningServer, _serving, tool_environment

pytestmark = pytest.mark.engine

KEY = "k3y-0123456789abcdef"
_READS = """
import sys
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
print("key:", args.api_key, "port:", args.port)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(f"api-key: {KEY}\nport: 4\n")
    return path


def reads(tree: Path, config: Path, arguments: list[str] | None = None) -> str:
    """Return the key and the port that the engine's own parser takes."""
    usual = ["--model-path", str(models.TINY_TARGET), "--device", "cpu", "--config", str(config), "--port", "5"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _READS, *(arguments or usual)],
        env=engine_environment(tree),
        capture_output=True,
        text=True,
        check=False,
    )
    return next((line for line in done.stdout.splitlines() if line.startswith("key:")), done.stderr)


def test_stock_reads_such_a_file_too(engine_trees: EngineTrees, config: Path) -> None:
    assert reads(engine_trees.stock, config) == f"key: {KEY} port: 5"


def test_the_engine_takes_the_emitted_command(engine_trees: EngineTrees, config: Path) -> None:
    """The command of a pod, its two folders put where they are on this machine."""
    done = CliRunner().invoke(cli, ["serve", "tiny", "--device", "cpu", "--emit", "kubernetes", "--json"])
    [text] = json.loads(done.stdout)["files"].values()
    pod = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    command = [
        word.replace(deployment.KEY_CONFIG, str(config)).replace(deployment.BUNDLED, str(models.TINY_TARGET.parents[1]))
        for word in pod["containers"][0]["command"]
    ]
    assert command[:4] == ["python3", "-P", "-m", "sglang.launch_server"]
    assert reads(engine_trees.patched, config, command[4:]) == f"key: {KEY} port: {deployment.CONTAINER_PORT}"


@pytest.mark.slow
@pytest.mark.parametrize("base", ["0.5.22"])
def test_older_bases_read_it(base: str, config: Path) -> None:
    assert reads(engine_trees_of(base).stock, config) == f"key: {KEY} port: 5"


@pytest.fixture(scope="module")
def locked(engine_trees: EngineTrees, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    scratch = tmp_path_factory.mktemp("locked")
    key = scratch / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(scratch / "state"))
        yield from _serving(engine_trees.patched, scratch, "--api-key-file", str(key))


def test_the_real_engine_keeps_the_key(locked: RunningServer, engine_trees: EngineTrees, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{locked.url}/health", trust_env=False).status_code == 200
    for path in ("/server_info", "/v1/models"):
        assert httpx.get(f"{locked.url}{path}", trust_env=False).status_code == 401, path
    info = httpx.get(f"{locked.url}/server_info", headers=headers, trust_env=False)
    assert info.status_code == 200
    assert locked.events["warm-up"]["accept_length"] > 2  # ours got in
    lines = [" ".join(psutil.Process(pid).cmdline()) for pid in locked.family()]
    log = locked.log.read_text()
    assert "api_key=" in log or "'api_key'" in log
    watched = subprocess.run(
        [sys.executable, "-m", "sglang_bw", "watch", "--url", locked.url, "--once", "--json"],
        env={**tool_environment(engine_trees.patched), "SGLANG_BW_API_KEY": KEY},
        capture_output=True,
        text=True,
        check=True,
    )
    exported = subprocess.run(
        [sys.executable, "-m", "sglang_bw", "ledger", "export"], capture_output=True, text=True, check=True
    )
    state = "".join(path.read_text() for path in locked.log.parent.rglob("server.json"))
    assert '"needs_key": true' in state
    shown = [info.text, log, watched.stdout, exported.stdout, state, *lines, *map(str, locked.events.values())]
    assert not [text for text in shown if KEY in text]
