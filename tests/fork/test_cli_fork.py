"""The commands as a user types them: one row an exit code, and never a traceback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bw import __version__, errors
from sglang_bw.cli import COMMANDS
from tests.fakeupstream import FILES, VERSION, FakeUpstream, wheel_bytes


def bw(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_bw", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


Break = Callable[[FakeUpstream], None]


def _truncate(upstream: FakeUpstream) -> None:
    data = upstream.wheel.read_bytes()[:-50]
    _pin_wheel(upstream, data)


def _traverse(upstream: FakeUpstream) -> None:
    _pin_wheel(upstream, wheel_bytes(FILES, extra={"../evil.py": b"x"}))


def _pin_wheel(upstream: FakeUpstream, data: bytes) -> None:
    import hashlib

    pins = upstream.base / "upstream.toml"
    old = next(iter(upstream.pins.wheels.values()))
    pins.write_text(pins.read_text().replace(old, hashlib.sha256(data).hexdigest()))
    upstream.wheel.write_bytes(data)


def _wrong_hash(upstream: FakeUpstream) -> None:
    upstream.wheel.write_bytes(wheel_bytes({**FILES, "sglang/other.py": b"x = 1\n"}))


def _conflict(upstream: FakeUpstream) -> None:
    patch = upstream.base / "0001-better-engine.patch"
    patch.write_bytes(patch.read_bytes().replace(b"-line 20\n", b"-line 2O\n"))


def _offset(upstream: FakeUpstream) -> None:
    patch = upstream.base / "0001-better-engine.patch"
    patch.write_bytes(patch.read_bytes().replace(b"@@ -17,7 +17,7 @@", b"@@ -15,7 +15,7 @@"))


def _duplicate(upstream: FakeUpstream) -> None:
    order = upstream.base / "series"
    order.write_text(order.read_text() + order.read_text().splitlines()[0] + "\n")


def _missing(upstream: FakeUpstream) -> None:
    (upstream.base / "0001-better-engine.patch").unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        pytest.param(_wrong_hash, errors.HashMismatchError, "sha256 is", id="wrong hash"),
        pytest.param(_truncate, errors.BadWheelError, "not a usable wheel", id="truncated wheel"),
        pytest.param(_traverse, errors.BadWheelError, "leaves the directory", id="path traversal"),
        pytest.param(
            _conflict,
            errors.PatchApplyError,
            "0001-better-engine.patch: python/sglang/engine.py: hunk 1 (line 17) does not apply: "
            "line 20 should be 'line 2O', found 'line 20'",
            id="conflict",
        ),
        pytest.param(_offset, errors.PatchApplyError, "+2 lines off", id="offset"),
        pytest.param(_duplicate, errors.LintError, "is listed 2 times", id="duplicate entry"),
        pytest.param(_missing, errors.LintError, "there is no such file", id="missing entry"),
    ],
)
def test_build_of_a_spoilt_input(
    spoil: Break, error: type[errors.BwError], said: str, upstream: FakeUpstream, tmp_path: Path
) -> None:
    spoil(upstream)
    done = bw("build", "--patches", upstream.root, "--wheel", upstream.wheel, "--out", tmp_path / "dist")
    assert done.returncode == error.exit_code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "dist").glob("*.whl"))


def test_build_without_git(upstream: FakeUpstream, tmp_path: Path) -> None:
    done = bw("build", "--patches", upstream.root, "--wheel", upstream.wheel, "--out", tmp_path / "d", PATH="/nowhere")
    assert done.returncode == errors.GitError.exit_code
    assert "git is not installed" in done.stderr


def test_build_without_network_or_cache(upstream: FakeUpstream, tmp_path: Path) -> None:
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = bw("build", "--patches", upstream.root, "--out", tmp_path / "dist", **environment)
    assert done.returncode == errors.DownloadError.exit_code
    assert "hint: check the network" in done.stderr


def test_build_of_an_unknown_base_and_into_a_file(upstream: FakeUpstream, tmp_path: Path) -> None:
    assert bw("build", "--patches", upstream.root, "--base", "9.9").returncode == errors.UnknownBaseError.exit_code
    (tmp_path / "dist").write_text("")
    done = bw("build", "--patches", upstream.root, "--wheel", upstream.wheel, "--out", tmp_path / "dist")
    assert done.returncode == errors.OutputError.exit_code


def test_build_of_every_wheel_of_a_release(upstream: FakeUpstream, tmp_path: Path) -> None:
    other = upstream.wheel.with_name(f"sglang-{VERSION}-cp312-cp312-manylinux_2_34_aarch64.whl")
    other.write_bytes(upstream.wheel.read_bytes())
    pins = upstream.base / "upstream.toml"
    line = next(line for line in pins.read_text().splitlines() if upstream.wheel.name in line)
    pins.write_text(pins.read_text().replace(line, f"{line}\n{line.replace(upstream.wheel.name, other.name)}"))
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(other.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = ("--patches", upstream.root, "--out", tmp_path / "dist")
    done = bw("build", "--all", "--json", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    made = [Path(wheel["wheel"]) for wheel in json.loads(done.stdout)["wheels"]]
    assert [path.name.split("-", 2)[2] for path in made] == [
        "cp312-cp312-manylinux_2_34_aarch64.whl",
        "py3-none-any.whl",
    ]
    assert all(path.is_file() for path in made)
    assert bw("build", "--all", "--python", "3.12", *arguments).returncode == 2


def test_unknown_command_and_option_are_usage_errors(upstream: FakeUpstream) -> None:
    assert bw("biuld").returncode == 2
    assert bw("build", "--pyhton", "3.12").returncode == 2
    assert bw("patches", "show", "nothing", "--patches", upstream.root).returncode == 2


def test_sigterm_ends_a_build_and_leaves_nothing(upstream: FakeUpstream, tmp_path: Path) -> None:
    slow = tmp_path / "bin/git"  # where the build is when it is ended
    slow.parent.mkdir()
    slow.write_text(
        f"#!/bin/sh\nif [ -d {tmp_path}/dist ]; then touch {tmp_path}/there; exec sleep 20; fi\n"
        f'exec {shutil.which("git")} "$@"\n'
    )
    slow.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "sglang_bw", "build", "--patches", upstream.root, "--wheel", upstream.wheel]
    environ = os.environ | {"PATH": f"{slow.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as tool:
        deadline = time.monotonic() + 60
        while not (tmp_path / "there").exists():
            assert tool.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [path.name[:7] for path in (tmp_path / "dist").iterdir()] == [".build-"]
        tool.terminate()
        assert tool.wait(30) == 130
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "dist").iterdir()) == []


def test_build_says_what_it_made_and_how_to_install_it(upstream: FakeUpstream, tmp_path: Path) -> None:
    place = tmp_path / "my place"
    place.mkdir()
    done = bw("build", "--patches", upstream.root, "--wheel", upstream.wheel, cwd=place)
    assert done.returncode == 0, done.stderr
    version = upstream.series().pins.full_version
    index = f"file://{tmp_path}/my%20place/dist/simple"
    assert f'pip install "sglang=={version}" --extra-index-url {index}\n' in done.stdout
    command = next(line for line in done.stdout.splitlines() if "sglang-bw install" in line)
    wheel = place / "dist" / upstream.wheel.name.replace(VERSION, version)
    assert shlex.split(command)[2:] == ["--wheel", str(wheel), "--patches", str(upstream.root)]
    assert "left out (no part of a wheel): test/test_engine.py" in done.stdout


def test_dry_run_writes_nothing(upstream: FakeUpstream, tmp_path: Path) -> None:
    done = bw("build", "--patches", upstream.root, "--wheel", upstream.wheel, "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["patches"] == list(upstream.series().order)
    assert not (tmp_path / "dist").exists()


def test_dry_run_refuses_what_the_build_refuses(upstream: FakeUpstream, tmp_path: Path) -> None:
    patch = upstream.base / "0001-better-engine.patch"
    patch.write_bytes(patch.read_bytes().replace(b"\nWhy: ", b"\nWhy: TODO "))
    at = ("--patches", upstream.root, "--wheel", upstream.wheel, "--out", tmp_path / "dist")
    for more in ((), ("--dry-run",)):
        done = bw("build", *at, *more)
        assert done.returncode == errors.LintError.exit_code, done.stdout
        assert "Why is still to be filled in" in done.stderr


def test_list_show_and_lint(upstream: FakeUpstream) -> None:
    listed = json.loads(bw("patches", "list", "--patches", upstream.root, "--json").stdout)
    assert [row["file"] for row in listed["patches"]] == list(upstream.series().order)
    assert "Pending" in bw("patches", "list", "--patches", upstream.root).stdout
    shown = bw("patches", "show", "better", "--patches", upstream.root)
    assert "+line twenty" in shown.stdout
    assert "It stops hurting." in json.loads(
        json.dumps(bw("patches", "show", "0001", "--patches", upstream.root, "--json").stdout)
    )
    assert bw("patches", "lint", "--patches", upstream.root).returncode == 0
    _missing(upstream)
    done = bw("patches", "lint", "--patches", upstream.root, "--json")
    assert done.returncode == errors.LintError.exit_code
    assert len(json.loads(done.stdout)["findings"]) == 1


def test_patch_is_shown_by_its_number(upstream: FakeUpstream) -> None:
    """Digits are a number first: other names may hold them too."""
    upstream.add_patch("sm120-table", {"python/sglang/table12.json": b"{}\n"})
    for name, topic in (("1", "better-engine"), ("2", "odd-files"), ("0002", "odd-files"), ("120", "sm120-table")):
        shown = bw("patches", "show", name, "--patches", upstream.root, "--json")
        assert shown.returncode == 0, shown.stderr
        assert topic in json.loads(shown.stdout)["file"]
    assert "fits 3 patches" in bw("patches", "show", "00", "--patches", upstream.root).stderr


def test_list_in_two_forms_is_refused(upstream: FakeUpstream) -> None:
    done = bw("patches", "list", "--markdown", "--json", "--patches", upstream.root)
    assert (done.returncode, done.stdout) == (2, "")


def test_every_error_class_has_an_exit_code_of_its_own() -> None:
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.BwError)
    ]
    # A class without one of its own is a kind of its parent.
    codes = [cls.exit_code for cls in classes if cls is not errors.BwError and "exit_code" in vars(cls)]
    assert all(cls.exit_code != errors.BwError.exit_code for cls in classes if cls is not errors.BwError)
    assert len(codes) == len(set(codes))
    assert not {0, 1, 2, 130} & set(codes)


@pytest.mark.alone
def test_version_names_tool_base_and_series_and_is_quick() -> None:
    best = 9.0
    for _ in range(5):
        started = time.perf_counter()
        done = bw("--version")
        best = min(best, time.perf_counter() - started)
    assert done.stdout.startswith(f"sglang-bw {__version__} (base ")
    assert best < 0.2


def test_help_has_the_commands_in_sections() -> None:
    said = bw("--help").stdout
    for word in ("Fork:", "Launch:", "build", "patches", "install", "verify", "serve"):
        assert word in said
    assert VERSION not in said


def test_every_command_of_the_help_can_be_imported() -> None:
    for section in COMMANDS.values():
        for name in section:
            done = bw(name, "--help")
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("Usage: sglang-bw " + name)


def test_wheel_of_an_unknown_name_and_an_empty_series_folder(upstream: FakeUpstream, tmp_path: Path) -> None:
    done = bw("build", "--patches", upstream.root, "--wheel", "foo.whl", "--dry-run")
    assert done.returncode == errors.BadWheelError.exit_code
    assert upstream.wheel.name in done.stderr
    assert bw("patches", "lint", "--patches", tmp_path).returncode == errors.UnknownBaseError.exit_code


@pytest.mark.parametrize("out", ["/proc/dist", "x" * 300])
def test_out_that_cannot_be_made(out: str, upstream: FakeUpstream, tmp_path: Path) -> None:
    done = bw("build", "--patches", upstream.root, "--wheel", upstream.wheel, "--out", out, cwd=tmp_path)
    assert done.returncode == errors.OutputError.exit_code
    assert "--out DIR" in done.stderr


@pytest.mark.parametrize("line", ["tree = 5", '[wheels]\n"x" = "0"', "version = 1"])
def test_broken_pins(line: str, upstream: FakeUpstream) -> None:
    (upstream.base / "upstream.toml").write_text(f'{line}\nversion = "{VERSION}"\n' if "=" in line[:8] else line)
    assert bw("patches", "lint", "--patches", upstream.root).returncode == errors.LintError.exit_code


def test_half_copied_wheel_beside_the_result_is_left_out_of_the_index(upstream: FakeUpstream, tmp_path: Path) -> None:
    half = tmp_path / "dist" / "sglang-0.0.1-py3-none-any.whl"
    half.parent.mkdir()
    half.write_bytes(upstream.wheel.read_bytes()[:-40])
    done = bw("build", "--patches", upstream.root, "--wheel", upstream.wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert half.name not in (half.parent / "simple" / "sglang" / "index.html").read_text()


def test_folder_named_pip_in_the_working_directory_is_not_run(upstream: FakeUpstream, tmp_path: Path) -> None:
    fake = tmp_path / "pip"
    fake.mkdir()
    (fake / "__main__.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # As the console script does: the working directory is not on the path of the tool itself.
    command = [sys.executable, "-P", "-m", "sglang_bw", "build", "--patches", str(upstream.root)]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, check=False)
    assert not (tmp_path / "ran").exists()
