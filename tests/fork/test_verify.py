from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_bw.errors import EditedEngineError, NotInstalledError, RefusedError, StockEngineError
from sglang_bw.fork.build import build
from sglang_bw.fork.record import RECORD_PATH
from sglang_bw.fork.verify import Problem, State, inspect
from tests.fakeupstream import VERSION, FakeUpstream, patched
from tests.fork.target import make_venv, record_digest, site_packages


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Stock and patched wheel of one release."""
    folder = tmp_path_factory.mktemp("verify")
    upstream = patched(FakeUpstream(folder / "upstream"))
    upstream.pin()
    return upstream.wheel, build(upstream.root, VERSION, wheel=upstream.wheel, out=folder / "dist").path


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def tree(wheels: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The patched engine, unpacked; the working directory is another, empty one."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return unpack(wheels[1], tmp_path / "tree")


@pytest.fixture
def venv(tree: Path, tmp_path: Path) -> Path:
    """A virtual environment with the patched engine in it."""
    made = make_venv(tmp_path / "venv")
    shutil.copytree(tree, site_packages(made), dirs_exist_ok=True)
    return made


def info_of(tree: Path) -> Path:
    return next(tree.glob("sglang-*.dist-info"))


def test_intact(tree: Path) -> None:
    found = inspect(tree=tree)
    assert (found.state, found.intact, found.base, found.error()) == (State.INTACT, True, VERSION, None)
    assert found.series.startswith("bw.0.d")
    assert found.version == f"{VERSION}+{found.series}"
    assert [(p.file, p.upstream_status) for p in found.patches] == [
        ("0001-better-engine.patch", "Pending"),
        ("0002-odd-files.patch", "Pending"),
    ]
    assert not found.added


@pytest.mark.parametrize("path", ["sglang/engine.py", "sglang/repeated.py", "sglang/added.py"])
def test_edited_file_is_named_whether_patched_or_not(tree: Path, path: str) -> None:
    (tree / path).write_bytes((tree / path).read_bytes() + b"# by hand\n")
    found = inspect(tree=tree)
    assert (found.state, found.problems) == (State.EDITED, (Problem("edited", path),))
    error = found.error()
    assert isinstance(error, EditedEngineError)
    assert path in error.message
    assert "sglang-bw install" in error.hint


def test_edit_that_keeps_size_and_time_is_found(tree: Path) -> None:
    path = tree / "sglang/engine.py"
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"twenty", b"TWENTY"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert inspect(tree=tree).problems == (Problem("edited", "sglang/engine.py"),)


def test_missing_file(tree: Path) -> None:
    (tree / "sglang/engine.py").unlink()
    found = inspect(tree=tree)
    assert (found.state, found.problems) == (State.MISSING, (Problem("missing", "sglang/engine.py"),))
    assert isinstance(found.error(), EditedEngineError)


def test_edited_and_missing_is_edited(tree: Path) -> None:
    (tree / "sglang/engine.py").unlink()
    (tree / "sglang/added.py").write_text("")
    found = inspect(tree=tree)
    assert found.state is State.EDITED
    assert {kind for kind, _ in found.problems} == {"edited", "missing"}


def test_file_that_the_series_deletes_is_back(tree: Path) -> None:
    (tree / "sglang/tool.sh").write_text("#!/bin/sh\n")
    found = inspect(tree=tree)
    assert (found.state, found.problems) == (State.EDITED, (Problem("undeleted", "sglang/tool.sh"),))


def test_edit_with_record_rewritten_to_match_is_found(tree: Path) -> None:
    path = tree / "sglang/engine.py"
    record = info_of(tree) / "RECORD"
    path.write_text("other\n")
    digest = record_digest(path.read_bytes())
    rows = record.read_text().splitlines()
    rows = [f"sglang/engine.py,{digest},6" if "/engine.py" in r else r for r in rows]
    record.write_text("\n".join(rows) + "\n")
    assert inspect(tree=tree).problems == (Problem("edited", "sglang/engine.py"),)


@pytest.mark.parametrize("newest", ["9.9.9", VERSION])
def test_cure_puts_this_engine_back_and_no_other(
    wheels: tuple[Path, Path], tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: str
) -> None:
    """A newer base, a later series of the same base, or local patches: the plain command installs something else."""
    series = FakeUpstream(tmp_path / "upstream", newest)
    pins = inspect(tree=tree)
    monkeypatch.setattr("sglang_bw.fork.cure.patches_root", lambda: series.root)
    (tree / "sglang/engine.py").unlink()
    python = str(tmp_path / "my env" / "bin/python")
    found = dataclasses.replace(inspect(tree=tree), python=python)
    error = found.error()
    assert error
    command = f"`sglang-bw install --python '{python}'"
    assert error.hint.startswith(f"{command} --wheel FILE` puts")  # nothing here makes it
    made = SimpleNamespace(pins=SimpleNamespace(full_version=pins.version))
    monkeypatch.setattr("sglang_bw.fork.cure.Series.load", lambda root, base: made)
    assert (error := found.error())
    assert error.hint == f"{command} --base {VERSION}` puts the recorded files back"
    assert (error := dataclasses.replace(found, version=f"{VERSION}+bw.1.local.0badcafe").error())
    assert error.hint.startswith(f"{command} --base {VERSION} --local DIR` puts the recorded files back; DIR is")


def test_removed_record_does_not_make_it_stock(tree: Path) -> None:
    (tree / RECORD_PATH).unlink()
    found = inspect(tree=tree)
    assert (found.state, found.problems) == (State.MISSING, (Problem("missing", RECORD_PATH),))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"schema_version": 99}'])
def test_unreadable_record(tree: Path, content: bytes) -> None:
    (tree / RECORD_PATH).write_bytes(content)
    found = inspect(tree=tree)
    assert found.state is State.EDITED
    assert Problem("record", RECORD_PATH) in found.problems


def test_no_dist_info_record_is_a_killed_install(tree: Path) -> None:
    (info_of(tree) / "RECORD").unlink()
    found = inspect(tree=tree)
    assert (found.state, found.problems) == (State.MISSING, (Problem("missing", f"{info_of(tree).name}/RECORD"),))


def test_two_distributions_of_the_name(tree: Path) -> None:
    shutil.copytree(info_of(tree), tree / "sglang-9.9.9.dist-info")
    found = inspect(tree=tree)
    assert (found.state, found.problems) == (State.EDITED, (Problem("duplicate", "sglang-9.9.9.dist-info"),))


def test_what_users_add_is_told_but_allowed(tree: Path) -> None:
    (tree / "sglang/configs").mkdir()
    (tree / "sglang/configs/E=8.json").write_text("{}")
    (tree / "sglang/__pycache__").mkdir()
    (tree / "sglang/__pycache__/engine.cpython-311.pyc").write_bytes(b"x")
    found = inspect(tree=tree)
    assert (found.state, found.added) == (State.INTACT, ("sglang/configs/E=8.json",))


def test_stock(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    found = inspect(tree=unpack(wheels[0], tmp_path / "stock"))
    assert (found.state, found.version, found.base, found.series) == (State.STOCK, VERSION, VERSION, "")
    assert isinstance(found.error(), StockEngineError)


def test_absent(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    error = inspect(venv).error()
    assert isinstance(error, NotInstalledError)
    assert f"no sglang is installed for {venv / 'bin/python'}" in error.message
    assert f"sglang-bw install --python {venv / 'bin/python'}" in error.hint


@pytest.mark.parametrize("holds", ["nothing", "no folder", "a package without .dist-info"])
def test_tree_without_an_engine(tmp_path: Path, holds: str) -> None:
    """The tree is named, and the hint is not an installation, which would not fill it."""
    tree = tmp_path / "tree"
    if holds != "no folder":
        tree.mkdir()
    if holds.startswith("a package"):
        (tree / "sglang").mkdir()
        (tree / "sglang/__init__.py").write_text("")
    found = inspect(tree=tree)
    error = found.error()
    assert found.state is State.ABSENT
    assert isinstance(error, NotInstalledError)
    assert error.message.startswith(f"{tree} holds no unpacked engine")
    assert f"zipfile -e WHEEL {tree}" in error.hint
    assert "sglang-bw install" not in error.hint


def test_other_environment_is_read_without_importing_anything_of_it(venv: Path) -> None:
    booby_trap = 'raise SystemExit("sglang was imported")\n'
    (site_packages(venv) / "sglang/__init__.py").write_text(booby_trap)
    found = inspect(venv)
    assert found.problems == (Problem("edited", "sglang/__init__.py"),)
    assert found.python == str(venv / "bin/python")
    assert inspect(venv / "bin" / "python") == found


@pytest.mark.parametrize("name", ["sglang/__init__.py", "sglang.py"])
@pytest.mark.parametrize("where", ["cwd", "PYTHONPATH"])
def test_shadowed(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str) -> None:
    shadow = tmp_path / "work" / name
    shadow.parent.mkdir(parents=True)
    shadow.write_text("")
    if where == "cwd":
        monkeypatch.chdir(tmp_path / "work")
    else:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "work"))
    found = inspect(venv)
    expected = shadow if name == "sglang.py" else shadow.parent
    assert (found.state, found.intact, found.shadowed_by) == (State.INTACT, False, expected)
    assert isinstance(found.error(), EditedEngineError)
    assert _imported_by(venv) == str(shadow)
    # An engine that is started with -P does not see the working directory, but PYTHONPATH it does.
    safe = inspect(venv, safe_path=True).shadowed_by
    assert safe == (None if where == "cwd" else expected)
    assert (_imported_by(venv, "-P") == str(shadow)) == (safe is not None)


def test_folder_that_python_would_not_import_is_no_shadow(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone of the upstream repository is named sglang too, but has no __init__.py at its top."""
    (tmp_path / "work" / "sglang" / "python").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert inspect(venv).intact
    assert _imported_by(venv) == str(site_packages(venv) / "sglang/__init__.py")


def test_shadow_by_an_earlier_path_entry(venv: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "sglang").mkdir(parents=True)
    (other / "sglang/__init__.py").write_text("")
    (site_packages(venv) / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(other)!r})\n")
    assert inspect(venv).shadowed_by == other / "sglang"
    assert _imported_by(venv) == str(other / "sglang/__init__.py")


def _imported_by(venv: Path, *options: str) -> str:
    """Ask Python itself which sglang a ``python -m`` in the working directory would get."""
    code = "import sglang; print(sglang.__file__)"
    done = subprocess.run([venv / "bin/python", *options, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_files_of_another_distribution_are_explained(venv: Path) -> None:
    site = site_packages(venv)
    (site / "sglang_kt-0.7.2.dist-info").mkdir()
    (site / "sglang_kt-0.7.2.dist-info/RECORD").write_text("sglang/engine.py,sha256=x,1\n")
    (site / "sglang/engine.py").write_text("theirs\n")
    found = inspect(venv)
    assert found.owners == ("sglang-kt",)
    assert "sglang-kt" in str(found.error())


def test_no_interpreter(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("#")
    for python in ("nowhere", "README", ""):
        with pytest.raises(RefusedError, match="cannot run"):
            inspect(tmp_path / python)
    with pytest.raises(RefusedError, match="no usable Python"):
        inspect(Path("/bin/true"))


def _cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_bw", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("state", "code"), [("intact", 0), ("edited", 22), ("missing", 22), ("stock", 21), ("absent", 20)]
)
def test_command_line(state: str, code: int, tree: Path, wheels: tuple[Path, Path], tmp_path: Path) -> None:
    if state == "edited":
        (tree / "sglang/engine.py").write_text("")
    elif state == "missing":
        (tree / "sglang/engine.py").unlink()
    elif state == "stock":
        tree = unpack(wheels[0], tmp_path / "stock")
    elif state == "absent":
        tree = tmp_path / "elsewhere"
    people = _cli("--tree", tree)
    assert people.returncode == code
    assert people.stdout.startswith(state)
    assert ("hint: `sglang-bw install" in people.stderr) == (code in (21, 22))
    assert ("hint: check the path" in people.stderr) == (code == 20)
    programs = _cli("--tree", tree, "--json")
    assert programs.returncode == code
    said = json.loads(programs.stdout)
    assert (said["state"], said["intact"]) == (state, code == 0)
    if state == "intact":
        assert "0001-better-engine.patch" in people.stdout
        assert "Pending" in people.stdout
        assert said["patches"][0]["why"] == "It stops hurting."
    if state in ("edited", "missing"):
        assert said["problems"] == [{"kind": state, "path": "sglang/engine.py"}]


def test_verify_imports_neither_torch_nor_sglang(tree: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sglang_bw.fork.verify import inspect;"
        f"inspect(tree=Path({str(tree)!r})); inspect();"
        "print([name for name in ('torch', 'sglang', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tree_with_an_overlong_name_holds_no_engine() -> None:
    assert inspect(tree=Path("x" * 300)).state is State.ABSENT
