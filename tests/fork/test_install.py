from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.errors import (
    BadWheelError,
    BwError,
    DownloadError,
    HashMismatchError,
    InstallError,
    LintError,
    OutputError,
    RefusedError,
    UnknownBaseError,
)
from sglang_bw.fork import checks, installers
from sglang_bw.fork.build import build
from sglang_bw.fork.driver import driver_version, needed_branch
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.install import install
from sglang_bw.fork.install_plan import plan_install
from sglang_bw.fork.installers import failure
from sglang_bw.fork.locks import Locked, find_uv
from sglang_bw.fork.rollback import _wrong, plan_rollback, roll_back
from sglang_bw.fork.verify import Installation, Problem, State, inspect
from tests.conftest import CHECKOUT
from tests.fakeupstream import VERSION, FakeUpstream, patched
from tests.fork.target import (
    MACHINE,
    PYTHON,
    Engine,
    Quiet,
    fake_interpreter,
    make_venv,
    offline_settings,
    site_packages,
    with_other_bytes,
    write_wheel,
)

pytestmark = pytest.mark.environments

needs_uv = pytest.mark.skipif(find_uv() is None, reason="uv is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("install")
    upstream = patched(FakeUpstream(folder / "upstream"))
    upstream.pin()
    built = build(upstream.root, VERSION, wheel=upstream.wheel, out=folder / "dist")
    mirror = folder / "mirror"
    mirror.mkdir()
    shutil.copy(upstream.wheel, mirror)
    dependency = write_wheel(mirror, "tinydep", "1.0", {"tinydep.py": b"VALUE = 1\n"})
    engine = Engine(upstream.root, VERSION, upstream.wheel, built.path, built.version, mirror)
    engine.lock(dependency)
    return engine


@pytest.fixture
def engine(made: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The release in a copy of its own, with pip and uv seeing its mirror only, and no driver on this machine."""
    for name, value in offline_settings(tmp_path / "mirror", tmp_path / "cache"):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr("sglang_bw.fork.install_plan.driver_version", lambda: None)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    shutil.copytree(made.root, tmp_path / "patches")
    shutil.copytree(made.mirror, tmp_path / "mirror")
    return dataclasses.replace(made, root=tmp_path / "patches", mirror=tmp_path / "mirror")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return make_venv(tmp_path / "venv")


def put(engine: Engine, venv: Path, **more: Any) -> Installation:
    """Plan and install."""
    return install(plan_install(engine.root, engine.request(venv, **more)), Quiet())


def unpacked(engine: Engine, venv: Path) -> Path:
    """Lay the built engine and its dependency into the environment without an installer; return site-packages."""
    site = site_packages(venv)
    for wheel in (engine.built, *engine.mirror.glob("tinydep-1.0-*.whl")):
        shutil.unpack_archive(wheel, site, "zip")
    return site


def run_cli(engine: Engine, venv: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_bw", "install", "--patches", engine.root, "--python", venv, *arguments]
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT)}  # this checkout's tool, wherever it is installed from
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environ)


class NoInstaller:
    """Stands in for every download and installer call, and fails the test."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("something was downloaded or installed")


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installers.Installer, "run", NoInstaller())
    monkeypatch.setattr("sglang_bw.fork.upstream._pip_download", NoInstaller())
    monkeypatch.setattr("sglang_bw.fork.build.build", NoInstaller())


# --- what ends up in the environment


def test_fresh_install(engine: Engine, venv: Path) -> None:
    report = Quiet()
    plan = plan_install(engine.root, engine.request(venv))
    assert not list(site_packages(venv).glob("*.dist-info"))
    found = install(plan, report)
    assert (found.intact, found.version) == (True, engine.version)
    assert Environment.probe(venv).installed == {"sglang": engine.version, "tinydep": "1.0"}
    assert [step.split()[0] for step in report.steps] == ["installing", "installing", "verifying"]
    assert not list(site_packages(venv).glob("*/direct_url.json"))  # it would keep a path of this machine
    code = "import sglang, tinydep; print(sglang.__version__, tinydep.VALUE)"
    done = subprocess.run([venv / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [engine.version, "1"]


def test_right_environment_is_left_alone(engine: Engine, venv: Path, nothing_runs: None) -> None:
    unpacked(engine, venv)
    plan = plan_install(engine.root, engine.request(venv))
    assert plan.nothing_to_do
    assert install(plan, Quiet()).intact


def test_stock_is_replaced(engine: Engine, venv: Path) -> None:
    shutil.unpack_archive(engine.stock, site_packages(venv), "zip")
    assert inspect(venv).state is State.STOCK
    assert put(engine, venv).intact
    assert not (site_packages(venv) / "sglang/tool.sh").exists()
    assert [p.name for p in site_packages(venv).glob("sglang-*")] == [f"sglang-{engine.version}.dist-info"]


@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=needs_uv)])
def test_same_version_with_other_bytes_is_replaced(engine: Engine, venv: Path, tmp_path: Path, installer: str) -> None:
    site = unpacked(engine, venv)
    other = with_other_bytes(engine.built, tmp_path / "rebuilt", "sglang/added.py", b"new = 2\n")
    assert other.name == engine.built.name
    found = put(engine, venv, wheel=other, installer=installer)
    assert (found.intact, found.version) == (True, engine.version)
    assert (site / "sglang/added.py").read_bytes() == b"new = 2\n"


@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=needs_uv)])
@pytest.mark.parametrize("damage", ["edited", "missing"])
def test_damaged_files_are_put_back(engine: Engine, venv: Path, damage: str, installer: str) -> None:
    target = unpacked(engine, venv) / "sglang/engine.py"
    before = target.read_bytes()
    target.unlink()
    if damage == "edited":
        target.write_bytes(b"# by hand\n")
    assert inspect(venv).state == damage
    assert put(engine, venv, installer=installer).intact
    assert target.read_bytes() == before


@needs_uv
def test_file_edited_through_a_hard_link_into_the_cache_of_uv_is_put_back(engine: Engine, venv: Path) -> None:
    """A plain ``uv pip install`` links files from its cache: an edit is made there too, and comes back."""
    uv = [str(find_uv()), "pip", "install", "--quiet", "--link-mode", "hardlink", "--no-deps", "--reinstall"]
    uv += ["--python", str(venv), "--find-links", str(engine.built.parent), f"sglang=={engine.version}"]
    subprocess.run(uv, check=True)
    target = site_packages(venv) / "sglang/engine.py"
    before = target.read_bytes()
    assert target.stat().st_nlink > 1
    with target.open("ab") as file:
        file.write(b"# by hand\n")
    subprocess.run(uv, check=True)
    assert inspect(venv).state is State.EDITED
    assert put(engine, venv, installer="uv").intact
    assert target.read_bytes() == before
    assert target.stat().st_nlink == 1


def test_dependency_of_another_version_is_replaced_and_told(engine: Engine, venv: Path) -> None:
    site = unpacked(engine, venv)
    engine.lock(write_wheel(engine.mirror, "tinydep", "2.0", {"tinydep.py": b"VALUE = 2\n"}))
    plan = plan_install(engine.root, engine.request(venv))
    assert (plan.replaced, plan.replace_engine) == ({"tinydep": ("1.0", "2.0")}, False)
    assert install(plan, Quiet()).intact
    assert (site / "tinydep.py").read_text() == "VALUE = 2\n"


def test_wheel_is_built_when_there_is_none(engine: Engine, venv: Path, tmp_path: Path) -> None:
    """From the mirror, by the user's own pip settings; the second time the built one is found."""
    (tmp_path / "work/dist").mkdir()
    plan = plan_install(engine.root, engine.request(venv, wheel=None))
    assert (plan.wheel, plan.steps[0]) == (None, f"build sglang {engine.version} into dist")
    assert install(plan, Quiet()).intact
    assert [p.name for p in Path("dist").glob("*.whl")] == [engine.built.name]
    assert plan_install(engine.root, engine.request(venv, wheel=None)).wheel is not None


def test_series_that_cannot_be_built_is_found_by_the_dry_run(engine: Engine, venv: Path, nothing_runs: None) -> None:
    patch = next((engine.root / VERSION).glob("0001-*"))
    patch.write_bytes(patch.read_bytes().replace(b"\nWhy: ", b"\nWhy: TODO "))
    with pytest.raises(LintError, match="still to be filled in"):
        plan_install(engine.root, engine.request(venv, wheel=None))
    assert plan_install(engine.root, engine.request(venv))  # a wheel that is there is not built


def test_wheel_of_an_older_series_is_not_taken_from_dist(engine: Engine, venv: Path, tmp_path: Path) -> None:
    dist = tmp_path / "work/dist"
    dist.mkdir()
    shutil.copy(engine.built, dist / engine.built.name.replace("+bw.0.d", "+bw.0.dfeed"))
    assert plan_install(engine.root, engine.request(venv, wheel=None)).wheel is None


def test_find_links(engine: Engine, venv: Path, tmp_path: Path) -> None:
    assert put(engine, venv, wheel=None, find_links=engine.built.parent).intact
    with pytest.raises(UnknownBaseError, match="no patched wheel"):
        plan_install(engine.root, engine.request(venv, wheel=None, find_links=tmp_path))


@needs_uv
def test_uv_environment(engine: Engine, tmp_path: Path) -> None:
    """Environments made by uv have no pip: the tool's own is used."""
    venv = tmp_path / "uv-venv"
    subprocess.run([str(find_uv()), "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    assert not list(site_packages(venv).glob("pip*"))
    assert put(engine, venv).intact


@needs_uv
def test_uv_copies_files(engine: Engine, venv: Path) -> None:
    put(engine, venv, installer="uv")
    files = [path for path in site_packages(venv).rglob("*") if path.is_file()]
    assert {"tinydep.py", "engine.py"} <= {path.name for path in files}
    assert not [path for path in files if path.stat().st_nlink > 1]


def test_variables_of_this_process_do_not_reach_the_target(
    engine: Engine, venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree on PYTHONPATH is neither taken for the installed engine nor touched; it is told, as it shadows it."""
    tree = tmp_path / "tree"
    shutil.unpack_archive(engine.stock, tree, "zip")
    monkeypatch.setenv("PYTHONPATH", str(tree))
    found = put(engine, venv)
    assert (found.state, found.shadowed_by) == (State.INTACT, tree / "sglang")
    assert (tree / f"sglang-{VERSION}.dist-info/RECORD").exists()


def test_torch_from_an_index_of_its_own(
    engine: Engine, venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch comes from there, unhashed, under a local version; the rest from the lock; CUDA's libraries not at all."""
    locked = [
        write_wheel(engine.mirror, name, version, {f"{name.replace('-', '_')}.py": b"BUILD = 'cuda'\n"})
        for name, version in {"torch": "2.0", "nvidia-nothing": "1.0", "triton": "3.0", "tinydep": "1.0"}.items()
    ]
    engine.lock(*locked)
    index = tmp_path / "index"
    wheel = write_wheel(index / "torch", "torch", "2.0+cpu", {"torch.py": b"BUILD = 'cpu'\n"})
    (index / "torch/index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    plan = plan_install(engine.root, engine.request(venv, torch_index=index.as_uri()))
    assert any("no hashes" in step for step in plan.steps)
    assert install(plan, Quiet()).intact
    installed = Environment.probe(venv).installed
    assert installed == {"torch": "2.0+cpu", "triton": "3.0", "tinydep": "1.0", "sglang": engine.version}
    assert plan_install(engine.root, engine.request(venv)).nothing_to_do


# --- back to stock


@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=needs_uv)])
def test_rollback(engine: Engine, venv: Path, installer: str) -> None:
    site = unpacked(engine, venv)
    plan = plan_rollback(engine.root, engine.request(venv, wheel=None, installer=installer))
    found = roll_back(plan, Quiet())
    assert (found.state, found.version, found.problems) == (State.STOCK, VERSION, ())
    assert Environment.probe(venv).installed == {"sglang": VERSION, "tinydep": "1.0"}
    assert (site / "sglang/engine.py").read_bytes().count(b"line 20\n") == 1
    assert (site / "sglang/tool.sh").exists()
    assert plan_rollback(engine.root, engine.request(venv, wheel=None)).nothing_to_do


def test_rollback_goes_to_the_base_that_is_installed(engine: Engine, venv: Path, tmp_path: Path) -> None:
    unpacked(engine, venv)
    engine.add_base("9.9.9")
    assert plan_rollback(engine.root, engine.request(venv, wheel=None)).version == VERSION


def unpack_stock(engine: Engine, venv: Path, version: str) -> Path:
    """Lay upstream's engine into the environment, under another version; return site-packages."""
    site = site_packages(venv)
    shutil.unpack_archive(engine.stock, site, "zip")
    info = (site / f"sglang-{VERSION}.dist-info").rename(site / f"sglang-{version}.dist-info")
    record = info / "RECORD"
    record.write_text(record.read_text().replace(f"sglang-{VERSION}.dist-info", info.name))
    return site


@pytest.mark.parametrize("version", ["0.9.0", "1.2.3.dev4+g0badcafe"])
def test_rollback_leaves_another_stock_release_alone(
    engine: Engine, venv: Path, nothing_runs: None, version: str
) -> None:
    unpack_stock(engine, venv, version)
    plan = plan_rollback(engine.root, engine.request(venv, wheel=None))
    assert (plan.nothing_to_do, plan.version, plan.steps) == (True, version, [])
    done = run_cli(engine, venv, "--rollback")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"nothing to do: stock SGLang {version} is there")
    assert not plan_rollback(engine.root, engine.request(venv, wheel=None, base=VERSION)).nothing_to_do


def test_rollback_from_nothing_known_is_refused_until_a_release_is_named(
    engine: Engine, venv: Path, nothing_runs: None
) -> None:
    with pytest.raises(RefusedError, match="no sglang is installed to go back from: --base VERSION"):
        plan_rollback(engine.root, engine.request(venv, wheel=None))
    assert plan_rollback(engine.root, engine.request(venv, wheel=None, base=VERSION)).version == VERSION
    site = unpacked(engine, venv)
    (engine.root / VERSION).rename(engine.root / "9.9.9")
    pins = engine.root / "9.9.9/upstream.toml"
    pins.write_text(pins.read_text().replace(f'version = "{VERSION}"', 'version = "9.9.9"'))
    with pytest.raises(RefusedError, match=f"no series here knows the stock release of sglang {VERSION}"):
        plan_rollback(engine.root, engine.request(venv, wheel=None))
    assert (site / "sglang/engine.py").is_file()


def test_engine_from_sources_is_told_with_the_way_back(engine: Engine, venv: Path, nothing_runs: None) -> None:
    site = unpack_stock(engine, venv, VERSION)
    origin = {"url": "file:///src/my%20fork/python", "dir_info": {"editable": True}}
    (site / f"sglang-{VERSION}.dist-info/direct_url.json").write_text(json.dumps(origin))
    told = "installed from sources: /src/my fork/python (editable)"
    done = run_cli(engine, venv, "--rollback")
    assert (done.returncode, told in done.stdout) == (0, True), done.stderr
    back = f"`python -m pip --python {venv}/bin/python install -e '/src/my fork/python'` brings it back"
    engine.add_base("9.9.9")
    for plan in (
        plan_install(engine.root, engine.request(venv)),
        plan_rollback(engine.root, engine.request(venv, wheel=None, base="9.9.9")),
    ):
        assert back in plan.notes[0]
    assert plan_rollback(engine.root, engine.request(venv, wheel=None)).notes == []


def test_rollback_names_what_is_wrong_afterwards() -> None:
    stock = Installation(State.STOCK, version="0.5.20")
    assert _wrong(stock, "0.5.23") == "sglang 0.5.20 is there, not 0.5.23"
    assert _wrong(dataclasses.replace(stock, problems=(Problem("edited", "sglang/a.py"),)), "0.5.20") == (
        "sglang/a.py is edited"
    )
    assert _wrong(dataclasses.replace(stock, state=State.INTACT), "0.5.20") == "sglang 0.5.20 is intact, not stock"
    assert _wrong(stock, "0.5.20") == ""


def test_rollback_checks_the_pinned_hash(engine: Engine, venv: Path) -> None:
    unpacked(engine, venv)
    pins = engine.root / VERSION / "upstream.toml"
    pins.write_text(pins.read_text().replace(hashlib.sha256(engine.stock.read_bytes()).hexdigest(), "0" * 64))
    with pytest.raises(HashMismatchError):
        roll_back(plan_rollback(engine.root, engine.request(venv, wheel=None)), Quiet())
    assert inspect(venv).intact


# --- interrupted


@pytest.mark.parametrize("killed", ["the tool and pip", "the tool alone"])
def test_killed_install_goes_on(engine: Engine, venv: Path, killed: str) -> None:
    """Killed while pip writes a dependency: the next call finishes, waiting for a pip that still runs."""
    files = {f"bulky/m{n}.py": b"".join(b"def f%d(): return %d\n" % (i, i) for i in range(150)) for n in range(300)}
    engine.lock(write_wheel(engine.mirror, "bulky", "1.0", files), next(engine.mirror.glob("tinydep*")))
    command = [sys.executable, "-m", "sglang_bw", "install", "--patches", engine.root, "--python", venv]
    command += ["--device", "cpu", "--wheel", engine.built]
    with subprocess.Popen(
        list(map(str, command)), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as tool:
        _wait_for((site_packages(venv) / "bulky/m0.py").exists, tool)
        if killed == "the tool alone":
            tool.kill()
        else:
            os.killpg(tool.pid, signal.SIGKILL)
    if killed == "the tool and pip":
        assert not (site_packages(venv) / "bulky-1.0.dist-info/RECORD").exists()
        assert (site_packages(venv) / installers.SCRATCH).exists()
    assert inspect(venv).state is State.ABSENT
    assert put(engine, venv).intact
    assert not (site_packages(venv) / installers.SCRATCH).exists()
    assert Environment.probe(venv).installed == {"sglang": engine.version, "tinydep": "1.0", "bulky": "1.0"}
    code = "import bulky.m299; print(bulky.m299.f149())"
    assert subprocess.run([venv / "bin/python", "-c", code], capture_output=True, text=True).stdout == "149\n"


@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=needs_uv)])
def test_sigterm_ends_the_installer_too_and_removes_the_scratch_folder(
    engine: Engine, venv: Path, installer: str
) -> None:
    """A service manager sends it to the tool alone: what is left running would change the environment later."""
    files = {f"bulky/m{n}.py": b"".join(b"def f%d(): return %d\n" % (i, i) for i in range(150)) for n in range(900)}
    engine.lock(write_wheel(engine.mirror, "bulky", "1.0", files), next(engine.mirror.glob("tinydep*")))
    command = [sys.executable, "-m", "sglang_bw", "install", "--patches", engine.root, "--python", venv]
    command += ["--device", "cpu", "--wheel", engine.built, "--installer", installer]
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    site = site_packages(venv)
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environ) as tool:
        _wait_for(
            (site / "bulky/m0.py").exists if installer == "pip" else (site / installers.SCRATCH / "lock.txt").exists,
            tool,
        )
        tool.terminate()
        said = tool.communicate(timeout=60)[1]
    assert (tool.returncode, said.splitlines()[-1]) == (130, "interrupted")
    with installers.locked(site, Quiet()):  # nobody writes there any more
        assert not (site / installers.SCRATCH).exists()
        assert inspect(venv).state is State.ABSENT


@pytest.mark.parametrize("command", ["install", "rollback"])
def test_what_was_left_beside_a_right_engine_is_cleared(engine: Engine, venv: Path, command: str) -> None:
    """A kill after the engine's RECORD was written, before pip has deleted the old one."""
    site = unpacked(engine, venv) if command == "install" else unpack_stock(engine, venv, VERSION)
    (site / "~glang/srt").mkdir(parents=True)
    (site / "~glang-1.0.dist-info").mkdir()
    (site / installers.SCRATCH).mkdir()
    done = run_cli(engine, venv, *(["--wheel", engine.built] if command == "install" else ["--rollback"]))
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert [path.name for path in site.glob("[~.]*")] == []


def _wait_for(happened: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process is None or process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_second_install_waits_for_the_first(tmp_path: Path) -> None:
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    report, entered = Quiet(), threading.Event()

    def second() -> None:
        with installers.locked(tmp_path, report):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    _wait_for(lambda: bool(report.steps))
    assert "waiting for another install" in report.steps[0]
    assert not entered.is_set()
    os.close(holder)
    thread.join(30)
    assert entered.is_set()


def test_environment_stays_locked_while_the_installer_of_a_killed_tool_still_writes(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from sglang_bw.fork.installers import Installer, locked
        from tests.fork.target import Quiet
        folder = Path(sys.argv[1])
        wait = "import os, time; open('started', 'x').close()\\nwhile not os.path.exists('go'): time.sleep(.01)"
        with locked(folder, Quiet()) as lock:
            Installer("pip", folder).run([sys.executable, "-c", wait], Quiet(), lock=lock, scratch=folder)
    """
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, env=environ) as tool:
        _wait_for((tmp_path / "started").exists, tool)
        tool.kill()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        (tmp_path / "go").touch()
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.close(descriptor)


@pytest.mark.parametrize("before", ["stock", "patched"])
def test_engine_half_replaced(engine: Engine, venv: Path, before: str) -> None:
    """What a kill during the replacement leaves: the old one aside under ``~``, the new one without RECORD."""
    site = site_packages(venv)
    shutil.unpack_archive(engine.stock if before == "stock" else engine.built, site, "zip")
    old = next(site.glob("sglang-*.dist-info"))
    old.rename(site / f"~{old.name[1:]}")
    (site / "sglang").rename(site / "~glang")
    shutil.unpack_archive(engine.built, site, "zip")
    (site / f"sglang-{engine.version}.dist-info/RECORD").unlink()
    (site / "sglang/engine.py").unlink()
    assert inspect(venv).state is State.MISSING
    assert put(engine, venv).intact
    assert not list(site.glob("~*"))


@pytest.mark.parametrize("record", ["whole", "cut off"])
def test_rollback_over_a_half_engine_leaves_stock_only(engine: Engine, venv: Path, record: str) -> None:
    """No installer knows the files of an engine without RECORD: those that patches add would be stock's now."""
    site = site_packages(venv)
    shutil.unpack_archive(engine.built, site, "zip")
    (site / f"sglang-{engine.version}.dist-info/RECORD").unlink()
    tuned = site / "sglang/tuned.json"
    tuned.write_text("{}")
    facts = json.loads((site / "sglang/_bw.json").read_text())
    if record == "cut off":
        (site / "sglang/_bw.json").write_text("{")
    else:
        # As a local patch has it: the series does not know that file.
        facts["files"]["sglang/own.py"] = "0" * 64
        (site / "sglang/own.py").write_text("own = 1\n")
        facts["files"]["../outside.py"] = "0" * 64
        (site / "sglang/_bw.json").write_text(json.dumps(facts))
    (site.parent / "outside.py").touch()
    done = run_cli(engine, venv, "--rollback")
    assert done.returncode == 0, done.stderr
    found = inspect(venv)
    assert (found.state, found.version, found.problems) == (State.STOCK, VERSION, ())
    assert found.added == ("sglang/tuned.json",)
    assert (site.parent / "outside.py").exists()


# --- refused before anything is downloaded


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        pytest.param({"version": [3, 10, 4]}, "Python 3.10.4", id="old Python"),
        pytest.param({"version": [3, 15, 0]}, "Python 3.15.0", id="new Python"),
        pytest.param({"implementation": "pypy"}, "pypy", id="pypy"),
        pytest.param({"free_threaded": True}, "free-threaded", id="free-threaded"),
        pytest.param({"system": "darwin"}, "Linux", id="macOS"),
        pytest.param({"machine": "riscv64"}, "riscv64", id="machine"),
    ],
)
def test_unfit_interpreter(
    engine: Engine, tmp_path: Path, nothing_runs: None, facts: dict[str, Any], reason: str
) -> None:
    python = fake_interpreter(tmp_path / "python", **facts)
    for plan in (plan_install, plan_rollback):
        with pytest.raises(RefusedError, match=reason):
            plan(engine.root, engine.request(python, wheel=None))


def test_a_base_without_locks_is_refused_with_what_can_be_done(engine: Engine, venv: Path, nothing_runs: None) -> None:
    shutil.rmtree(engine.root / VERSION / "locks")
    with pytest.raises(RefusedError, match=f"no dependency locks: `sglang-bw build --base {VERSION}`"):
        plan_install(engine.root, engine.request(venv, wheel=None))


@pytest.mark.parametrize(
    ("libc", "fits"),
    [(["glibc", "2.34"], True), (["glibc", "2.41"], True), (["glibc", "2.31"], False), (["", ""], False)],
)
def test_glibc(libc: list[str], fits: bool, venv: Path) -> None:
    environment = dataclasses.replace(Environment.probe(venv), libc=(libc[0], libc[1]))
    name = "sglang-1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
    assert (not list(checks.libc(environment, name))) == fits


def test_pep_668(engine: Engine, venv: Path, tmp_path: Path, nothing_runs: None) -> None:
    """The system's Python, whose marker forbids it; the same marker means nothing inside a venv."""
    (tmp_path / "EXTERNALLY-MANAGED").write_text("[externally-managed]\n")
    managed = {"stdlib": str(tmp_path), "purelib": str(site_packages(venv))}
    system = fake_interpreter(tmp_path / "bin/system", **managed, prefix="/usr", base_prefix="/usr")
    for plan in (plan_install, plan_rollback):
        with pytest.raises(RefusedError, match="PEP 668"):
            plan(engine.root, engine.request(system, wheel=None))
    inside = fake_interpreter(tmp_path / "bin/inside", **managed, prefix=str(venv), base_prefix="/usr")
    assert plan_install(engine.root, engine.request(inside, wheel=None)).missing


@pytest.mark.parametrize("name", ["sglang_kt", "lsglang"])
def test_other_distribution_in_the_same_folder(engine: Engine, venv: Path, nothing_runs: None, name: str) -> None:
    wheel = write_wheel(engine.mirror, name, "0.7.2", {"sglang/__init__.py": b"", "other.py": b""})
    shutil.unpack_archive(wheel, site_packages(venv), "zip")
    for plan in (plan_install, plan_rollback):
        with pytest.raises(RefusedError, match=name.replace("_", "-") + " has files of its own in sglang/"):
            plan(engine.root, engine.request(venv, wheel=None))
    shutil.rmtree(site_packages(venv) / f"{name}-0.7.2.dist-info")
    assert plan_install(engine.root, engine.request(venv))


def test_distribution_of_a_longer_name_is_no_clash(engine: Engine, venv: Path) -> None:
    wheel = write_wheel(engine.mirror, "sglang_router", "0.3", {"sglang_router/__init__.py": b"import sglang/\n"})
    shutil.unpack_archive(wheel, site_packages(venv), "zip")
    assert plan_install(engine.root, engine.request(venv))


@pytest.mark.parametrize("free", [0, 1 << 28])
def test_full_disk(engine: Engine, venv: Path, nothing_runs: None, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage(venv)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    for plan in (plan_install, plan_rollback):
        with pytest.raises(RefusedError, match=r"GiB are free at .*, about \d+\.\d GiB are needed"):
            plan(engine.root, engine.request(venv, base=VERSION))


def test_environment_that_cannot_be_written(engine: Engine, tmp_path: Path, nothing_runs: None) -> None:
    python = fake_interpreter(tmp_path / "python", purelib=str(tmp_path / "nowhere"))
    for plan in (plan_install, plan_rollback):
        with pytest.raises(RefusedError, match="nowhere cannot be written to"):
            plan(engine.root, engine.request(python, wheel=None))


def test_every_reason_is_told_at_once(engine: Engine, tmp_path: Path) -> None:
    python = fake_interpreter(tmp_path / "python", version=[3, 9, 1], machine="riscv64", system="win32")
    with pytest.raises(RefusedError, match="for 3 reasons") as caught:
        plan_install(engine.root, engine.request(python, wheel=None))
    assert caught.value.message.count("\n  ") == 3


@pytest.mark.parametrize(
    ("driver", "device", "outcome"),
    [
        pytest.param(None, "auto", "cpu", id="none: the CPU set"),
        pytest.param("580.95.05", "auto", "cuda", id="fits: the GPU set"),
        pytest.param("580.95.05", "cpu", "cpu", id="fits, but the CPU set is asked for"),
        pytest.param(None, "cuda", "no NVIDIA driver", id="none, but the GPU set is asked for"),
        pytest.param("575.57.08", "cuda", "575.57.08 is too old", id="too old"),
        pytest.param("575.57.08", "auto", "575.57.08 is too old", id="too old, seen by itself"),
    ],
)
def test_driver(
    engine: Engine, venv: Path, monkeypatch: pytest.MonkeyPatch, driver: str | None, device: str, outcome: str
) -> None:
    runtime = write_wheel(engine.mirror, "nvidia-cuda-runtime", "13.0.96", {"cudart.py": b""})
    engine.lock(runtime, device="cuda")
    monkeypatch.setattr("sglang_bw.fork.install_plan.driver_version", lambda: driver)
    request = dataclasses.replace(engine.request(venv), device=device)
    if outcome in ("cpu", "cuda"):
        assert plan_install(engine.root, request).device == outcome
        return
    with pytest.raises(RefusedError, match=outcome):
        plan_install(engine.root, request)
    assert plan_install(engine.root, dataclasses.replace(request, check_driver=False)).device == "cuda"


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025\nGCC version: 13\n"


@pytest.mark.parametrize(
    ("text", "nodes", "version"),
    [
        pytest.param(OPEN, ["nvidia0", "nvidiactl"], "580.95.05", id="open"),
        pytest.param(CLOSED, ["nvidia3"], "550.163.01", id="closed"),
        pytest.param(OPEN, ["nvidiactl", "nvidia-uvm"], None, id="container without a GPU"),
        pytest.param(None, [], None, id="none"),
    ],
)
def test_driver_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, nodes: list[str], version: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "dev").mkdir()
    for node in nodes:
        (tmp_path / "dev" / node).touch()
    if text:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert driver_version(tmp_path) == version


@pytest.mark.parametrize(("said", "version"), [("580.95.05\n580.95.05", "580.95.05"), ("Failed to initialize", None)])
def test_driver_version_where_the_kernel_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, version: str | None
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version(tmp_path) == version


def test_needed_branch_follows_the_cuda_runtime_of_the_lock() -> None:
    assert needed_branch([Locked("nvidia-cuda-runtime", "13.0.96", ())]) == 580
    assert needed_branch([Locked("nvidia-cuda-runtime-cu12", "12.8.90", ())]) == 525


# --- bad wheels


def test_bad_wheels(engine: Engine, venv: Path, tmp_path: Path, nothing_runs: None) -> None:
    truncated = tmp_path / "truncated" / engine.built.name
    truncated.parent.mkdir()
    truncated.write_bytes(engine.built.read_bytes()[:-200])
    for wheel, reason in (
        (engine.stock, "not a patched engine"),
        (truncated, "no usable wheel"),
        (tmp_path / "nowhere.whl", "nowhere"),
        (tmp_path / "sglang-1.2.3+bw.1-py3-none-any.whl", "No such file"),
    ):
        with pytest.raises(BadWheelError, match=reason):
            plan_install(engine.root, engine.request(venv, wheel=wheel))
    engine.add_base("9.9.9")
    with pytest.raises(RefusedError, match=r"made from SGLang 1\.2\.3"):
        plan_install(engine.root, engine.request(venv, base="9.9.9"))


def test_wheel_for_another_python(engine: Engine, venv: Path, tmp_path: Path, nothing_runs: None) -> None:
    other = tmp_path / engine.built.name.replace("py3-none-any", "cp399-cp399-linux_x86_64")
    shutil.copy(engine.built, other)
    with pytest.raises(RefusedError, match=f"is not for Python {PYTHON} on {MACHINE}"):
        plan_install(engine.root, engine.request(venv, wheel=other))


def test_damaged_wheel_is_found_before_the_environment_changes(engine: Engine, venv: Path, tmp_path: Path) -> None:
    import zipfile

    damaged = tmp_path / "damaged" / engine.built.name
    damaged.parent.mkdir()
    with zipfile.ZipFile(engine.built) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"# other\n" if name == "sglang/engine.py" else old.read(name))
    with pytest.raises(BadWheelError):
        put(engine, venv, wheel=damaged)
    assert Environment.probe(venv).installed == {}


def test_disk_that_is_full_only_later(engine: Engine, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/there")

    unpacked(engine, venv)
    (site_packages(venv) / "sglang/engine.py").unlink()
    plan = plan_install(engine.root, engine.request(venv))
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OutputError, match="/there: No space left"):
        install(plan, Quiet())
    monkeypatch.undo()
    assert not (site_packages(venv) / installers.SCRATCH).exists()


# --- what installers say


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        pytest.param(
            [
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated",
                "six==1.17.0 from https://example.org/six-1.17.0-py2.py3-none-any.whl (from -r lock.txt (line 1)):",
                "Expected sha256 0000",
                "Got        4721",
            ],
            HashMismatchError, "six==1.17.0", id="pip, hash",
        ),
        pytest.param(
            ["error: Failed to download `six==1.17.0`", "cause: Hash mismatch for `six==1.17.0`", "Expected:"],
            HashMismatchError, "six==1.17.0", id="uv, hash",
        ),
        pytest.param(
            [
                ("WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"HTTPConnection"
                "(host='h'): Failed to establish a new connection: [Errno 111] Connection refused\")': /six/"),
                "ERROR: No matching distribution found for six==1.17.0",
            ],
            DownloadError, "network", id="pip, no network",
        ),
        pytest.param(
            ["error: Request failed after 3 retries in 7.9s", "cause: error sending request for url (http://h/six/)"],
            DownloadError, "network", id="uv, no network",
        ),
        pytest.param(
            ["ERROR: Could not find a version that satisfies the requirement six==99.0 (from versions: 1.17.0)",
             "ERROR: No matching distribution found for six==99.0"],
            DownloadError, "mirror", id="pip, not there",
        ),
        pytest.param(
            ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"],
            OutputError, "full", id="pip, disk",
        ),
        pytest.param(
            ["ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/opt/x'"],
            OutputError, "written", id="pip, rights",
        ),
        pytest.param(["Traceback", "ValueError: no"], InstallError, "ValueError: no", id="anything else"),
        pytest.param([], InstallError, "exit code 1", id="silence"),
    ],
)  # fmt: skip
def test_failures_have_their_class(said: list[str], kind: type[BwError], text: str) -> None:
    error = failure("pip", 1, said)
    assert type(error) is kind
    assert text in str(error)


# --- the command line


def test_command_line_from_nothing_to_patched_and_back(engine: Engine, venv: Path) -> None:
    common = ("--device", "cpu", "--wheel", str(engine.built))
    dry = run_cli(engine, venv, *common, "--dry-run")
    assert (dry.returncode, inspect(venv).state) == (0, State.ABSENT)
    assert f"install sglang=={engine.version} without dependencies" in dry.stderr
    fresh = run_cli(engine, venv, *common)
    assert fresh.returncode == 0, fresh.stderr
    assert fresh.stdout.startswith("intact")
    assert "0001-better-engine.patch" in fresh.stdout
    again = run_cli(engine, venv, *common, "--json")
    said = json.loads(again.stdout)
    assert (again.returncode, said["nothing_to_do"], said["verify"]["state"]) == (0, True, "intact")
    back = run_cli(engine, venv, "--rollback")
    assert back.returncode == 0, back.stderr
    assert back.stdout.startswith("stock")


@pytest.mark.parametrize(
    ("case", "code"),
    [("hash", 13), ("bad wheel", 14), ("no network", 15), ("refused", 18), ("shadowed", 22), ("usage", 2)],
)
def test_exit_codes(engine: Engine, venv: Path, monkeypatch: pytest.MonkeyPatch, case: str, code: int) -> None:
    arguments = ["--device", "cpu", "--wheel", str(engine.built)]
    if case == "hash":
        write_wheel(engine.mirror, "tinydep", "1.0", {"tinydep.py": b"EVIL = 1\n"})
    elif case == "bad wheel":
        arguments[-1] = str(engine.stock)
    elif case == "no network":
        for wheel in engine.mirror.glob("tinydep*"):
            wheel.unlink()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
        monkeypatch.setenv("PIP_RETRIES", "0")
    elif case == "refused":
        arguments[1] = "cuda"
        engine.lock(next(engine.mirror.glob("tinydep*")), device="cuda")
        monkeypatch.setenv("PATH", "")
    elif case == "shadowed":
        Path("sglang").mkdir()
        Path("sglang/__init__.py").touch()
    else:
        arguments.append("--rollback")
    done = run_cli(engine, venv, *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("hint:" in done.stderr) == (code != 2)
    assert (inspect(venv).state is State.INTACT) == (case == "shadowed")
