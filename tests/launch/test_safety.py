"""Launches that are refused because they would hand the machine to others."""

from __future__ import annotations

import pytest

from sglang_bw.errors import UnsafeLaunchError
from sglang_bw.launch import command as commands
from sglang_bw.launch import safety
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe


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
