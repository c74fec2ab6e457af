"""Launches that are refused because they would hand the machine to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_bw.errors import UnsafeLaunchError
from sglang_bw.launch import command as commands
from sglang_bw.launch import safety
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


def command(*extra: str, **recipe: object) -> Command:
    made = Recipe.model_validate({"id": "my", "target": "owner/model", **recipe})
    return commands.build(made, Hardware(device="cuda"), {}, extra=flags.parse(extra))


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.7", False),
        ("localhost.example.org", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, is_loopback: bool) -> None:
    assert safety.is_loopback(host) is is_loopback


def test_an_open_server_is_refused_unless_it_is_wanted() -> None:
    launch = command("--host", "0.0.0.0")
    with pytest.raises(UnsafeLaunchError, match="it has no key") as refused:
        safety.check_open(launch, allowed=False)
    assert "--api-key-file" in refused.value.hint
    assert "it has no key" in safety.check_open(launch, allowed=True)
    assert safety.check_open(command("--host", "0.0.0.0", "--api-key", "k"), allowed=False) == ""
    assert safety.check_open(command(), allowed=False) == ""


def test_remote_code_runs_from_a_pinned_commit() -> None:
    trusted = {"args": {"trust-remote-code": True}}
    draft = {"draft": "owner/draft", "spec": {"steps": 3, "topk": 1, "draft_tokens": 4}}
    assert safety.check_remote_code(command(), {}) == []
    told = safety.check_remote_code(command("--revision", COMMIT, **trusted), {})
    assert told == ["code of owner/model at 0123456789ab will run (trust-remote-code)"]
    both = command("--revision", COMMIT, "--speculative-draft-model-revision", OTHER, **trusted, **draft)
    assert len(safety.check_remote_code(both, {})) == 2
    pinned = {"target": {"id": "owner/model", "revision": COMMIT}}
    assert safety.check_remote_code(command(**trusted, **pinned), {})
    with pytest.raises(UnsafeLaunchError, match="the draft owner/draft: no commit") as refused:
        safety.check_remote_code(command(**trusted, **pinned, **draft), {})
    assert "--speculative-draft-model-revision COMMIT" in refused.value.hint


@pytest.mark.parametrize("revision", [(), ("--revision", "main"), ("--revision", COMMIT[:12])])
def test_remote_code_that_may_change_is_refused(revision: tuple[str, ...]) -> None:
    with pytest.raises(UnsafeLaunchError, match="no commit is pinned"):
        safety.check_remote_code(command("--trust-remote-code", *revision), {})


def test_the_way_out_names_the_commit_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    with pytest.raises(UnsafeLaunchError) as refused:
        safety.check_remote_code(command("--trust-remote-code"), {"HF_HUB_CACHE": str(tmp_path)})
    assert f"-- --revision {COMMIT}" in refused.value.hint


def test_remote_code_of_this_disk_is_told_of(tmp_path: Path) -> None:
    told = safety.check_remote_code(command("--trust-remote-code", "--model-path", str(tmp_path)), {})
    assert told == [f"code that lies in {tmp_path} will run (trust-remote-code)"]
