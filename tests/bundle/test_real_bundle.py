"""The real thing: the CPU set of the newest base, bundled, installed and serving without a network. About 3 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_bw.bundle import toolwheel
from sglang_bw.fork.locks import find_uv
from tests.conftest import CHECKOUT

pytestmark = [pytest.mark.environments, pytest.mark.slow, pytest.mark.timeout(3600)]

ASK = Path(__file__).with_name("ask_offline.py")
ALONE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def run(*command: object, code: int = 0, **environ: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )
    assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_bundle_serves_where_there_is_no_network(tmp_path: Path) -> None:
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network namespace")
    out = run(
        sys.executable,
        "-m",
        "sglang_bw",
        "bundle",
        "--device",
        "cpu",
        "--split",
        "200M",
        "--output",
        tmp_path,
        "--json",
    )
    made = json.loads(out)
    into = tmp_path / "env"
    install = [*ALONE, "sh", f"{made['folder']}/install.sh", "--into", into, "--expect", made["digest"]]
    said = run(*install, "--python", sys.executable)
    assert f"intact: sglang {made['manifest']['engine']}" in said
    assert "nothing to do" in run(*install)
    environ = {"HOME": str(tmp_path), "PYTHONPATH": "", "SGLANG_BW_LEDGER": str(tmp_path / "ledger.sqlite3")}
    answer = json.loads(run(*ALONE, into / "bin/python", ASK, into / "bin/sglang-bw", **environ).splitlines()[-1])
    assert answer["alone"]
    assert answer["tokens"] == 32
    assert answer["rounds"] < 32, "no draft token was accepted"


def test_tool_wheel_holds_what_the_build_backend_packs(tmp_path: Path) -> None:
    """Ours needs no backend and no sources; but for the metadata, which is the installed tool's, it is the same."""
    uv = find_uv()
    assert uv
    run(uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "backend", CHECKOUT)
    theirs = _members(next((tmp_path / "backend").glob("*.whl")))
    (tmp_path / "ours").mkdir()
    ours = _members(toolwheel.tool_wheel(tmp_path / "ours"))
    assert set(ours) == set(theirs)
    differ = {name.rpartition("/")[2] for name in ours if ours[name] != theirs[name]}
    assert differ <= {"WHEEL", "METADATA", "RECORD"}


def _members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
