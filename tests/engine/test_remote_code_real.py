"""The real engine runs the code of the commit that was trusted, and no other, whatever the hub's cache calls main."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sglang_bw import models
from tests.conftest import EngineTrees
from tests.engine.conftest import _serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FIRST, SECOND = "a" * 40, "b" * 40
# A configuration of its own, as models outside of transformers have one; it says which commit's code ran.
_CODE = """
import os
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

with open(os.environ["RAN"], "a") as file:
    file.write("COMMIT\\n")
"""


def snapshot(repository: Path, commit: str) -> None:
    folder = repository / "snapshots" / commit
    shutil.copytree(models.TINY_TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(_CODE.replace("COMMIT", commit))


def test_the_engine_runs_the_trusted_commit(
    engine_trees: EngineTrees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--org--own"
    ran = tmp_path / "ran"
    for commit in (FIRST, SECOND):
        snapshot(repository, commit)
    (repository / "refs").mkdir()
    for name, value in {"HF_HUB_CACHE": "hub", "HF_MODULES_CACHE": "modules", "XDG_STATE_HOME": "state"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("RAN", str(ran))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    launch = ("--model-path", "org/own")
    for main, consent in ((FIRST, ("--pin",)), (SECOND, ())):
        (repository / "refs" / "main").write_text(main)
        scratch = tmp_path / main[:1]
        scratch.mkdir()
        for server in _serving(engine_trees.patched, scratch, *launch, *consent, "--", "--trust-remote-code"):
            assert f"--revision {FIRST}" in server.log.read_text()
            assert len(server.generate("At the end of the winter", 8)["text"]) > 0
        assert set(ran.read_text().split()) == {FIRST}
        ran.unlink()
        shutil.rmtree(tmp_path / "modules")
