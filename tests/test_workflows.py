"""The scheduled workflow, run step by step as its runner would, with only GitHub's own program replaced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_bw.fork import upstream as cache
from tests.fakeupstream import FakeUpstream, release
from tests.fork.simple_index import SimpleIndex
from tests.fork.test_rebase_words import RUNNER, edit

WORKFLOW = Path(__file__).parent.parent / ".github" / "workflows" / "rebase.yml"
OLD, NEW = "2.0.0", "2.1.0"
ENGINE = {"sglang/runner.py": RUNNER}
BIGGER = (b"size = 1", b"size = 2")
EXPRESSION = re.compile(r"\$\{\{ *(.+?) *\}\}")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclass
class Runner:
    """What GitHub does with a job: expressions, outputs and conditions, one shell a step."""

    clone: Path
    calls: Path
    environment: dict[str, str]
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def value(self, expression: str) -> str:
        if expression == "github.token":
            return "a-token"
        steps, step, outputs, name = expression.split(".")
        assert (steps, outputs) == ("steps", "outputs"), expression
        return self.outputs[step][name]

    def holds(self, condition: str) -> bool:
        left, equal, right = condition.partition(" != ")
        assert equal, condition
        return self.value(left) != right.strip("'")

    def run(self, step: dict[str, Any]) -> None:
        if "if" in step and not self.holds(step["if"]):
            return
        out = self.calls.with_name("output")
        out.write_text("")
        values = {
            key: EXPRESSION.sub(lambda found: self.value(found[1]), text) for key, text in step.get("env", {}).items()
        }
        # As the runner calls it: a failing command ends the step.
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]],
            cwd=self.clone,
            env={**self.environment, **values, "GITHUB_OUTPUT": str(out)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{step.get('name', step['run'])}:\n{done.stdout}{done.stderr}"
        self.ran.append(step.get("name", "setup"))
        if "id" in step:
            self.outputs[step["id"]] = dict(line.split("=", 1) for line in out.read_text().splitlines())

    def job(self) -> None:
        for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["check"]["steps"]:
            if "run" in step and not step["run"].startswith("pip install"):
                self.run(step)


@dataclass(frozen=True)
class Hub:
    runner: Runner
    origin: Path
    index: SimpleIndex
    folder: Path

    def release(self, runner: bytes) -> None:
        self.index.add(release(self.folder, NEW, {"sglang/runner.py": runner}))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.runner.calls.read_text().splitlines()]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    upstream = FakeUpstream(tmp_path / "upstream", OLD, ENGINE)
    upstream.add_patch("size", {"python/sglang/runner.py": edit(RUNNER, BIGGER)}, {"Applies-To": ">=2.0"})
    upstream.pin()
    cache.keep(upstream.wheel)
    origin, work = tmp_path / "origin.git", tmp_path / "work"
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", str(origin))
    git(tmp_path, "clone", "--quiet", str(origin), str(work))
    upstream.root.rename(work / "patches")
    for key, text in {"user.name": "someone", "user.email": "someone@example.org"}.items():
        git(work, "config", key, text)
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "--message", "the project")
    git(work, "push", "--quiet", "origin", "HEAD:main")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.write_text("")
    recorder = f"import json, sys\nopen({str(calls)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
    scripts = {"gh": recorder, "sglang-bw": "from sglang_bw.cli import main\nmain()\n"}
    for name, text in scripts.items():
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
        (programs / name).chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    with SimpleIndex() as index:
        index.add(upstream.wheel)
        settings = {"PIP_INDEX_URL": index.url, "PIP_CONFIG_FILE": os.devnull, "GIT_CONFIG_GLOBAL": os.devnull}
        kept = {key: text for key, text in os.environ.items() if not key.startswith(("PIP_", "GIT_"))}
        path = os.pathsep.join((str(programs), os.environ["PATH"]))
        package = str(Path(__file__).parent.parent)
        environment = kept | settings | {"PATH": path, "PYTHONPATH": package}
        yield Hub(Runner(clone, calls, environment), origin, index, tmp_path)


def test_nothing_new_opens_nothing(hub: Hub) -> None:
    hub.runner.job()
    assert hub.runner.outputs == {"check": {"code": "0", "new": ""}}
    assert hub.runner.ran == ["What do newer releases give?"]
    assert hub.calls == []
    assert json.loads((hub.runner.clone / "report.json").read_text())["releases"] == []


def test_new_release_becomes_a_draft_once(hub: Hub) -> None:
    hub.release(b"import sys\n" + RUNNER)
    hub.runner.job()
    assert hub.runner.outputs == {"check": {"code": "43", "new": NEW}}
    branch = f"rebase-{NEW}"
    assert hub.calls == [
        ["pr", "create", "--draft", "--head", branch, "--title", f"SGLang {NEW}", "--body-file", "body.md"]
    ]
    assert f"## SGLang {OLD} to {NEW}" in (hub.runner.clone / "body.md").read_text()
    # What the branch adds is the new base, and nothing else that the steps left in the clone.
    files = git(hub.origin, "diff", "--name-only", "main", branch).splitlines()
    assert files == [f"patches/{NEW}/0001-size.patch", f"patches/{NEW}/series", f"patches/{NEW}/upstream.toml"]
    # The next day: the branch is there, and a person has it.
    again = Path(git(hub.folder, "clone", "--quiet", str(hub.origin), "again") or hub.folder / "again")
    Runner(again, hub.runner.calls, hub.runner.environment).job()
    assert len(hub.calls) == 1


def test_release_that_needs_a_person_says_so(hub: Hub) -> None:
    hub.release(edit(RUNNER, (b"size = 1", b"size = 7")))
    hub.runner.job()
    assert hub.runner.outputs["check"]["code"] == "44"
    assert "0001-size.patch" in (hub.runner.clone / "body.md").read_text()
    assert "conflict, left out" in (hub.runner.clone / "body.md").read_text()
    assert len(hub.calls) == 1
