"""One base to another in real environments, and back: two releases of the fake upstream, one tiny locked package."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.errors import (
    BwError,
    DownloadError,
    LocalPatchesLostError,
    NotInstalledError,
    RefusedError,
    UnknownBaseError,
)
from sglang_bw.fork.build import build
from sglang_bw.fork.changes import compare
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.install import install
from sglang_bw.fork.install_plan import Request, plan_install
from sglang_bw.fork.keep import keep
from sglang_bw.fork.record import PatchRecord
from sglang_bw.fork.upgrade import UpgradePlan, plan_upgrade, upgrade
from sglang_bw.fork.verify import Installation, State, inspect
from sglang_bw.fork.wheelhouse import PatchedWheel
from tests.conftest import CHECKOUT
from tests.fakeupstream import FakeUpstream, patched
from tests.fork.ownpatches import own_series
from tests.fork.target import Engine, Quiet, fake_interpreter, make_venv, offline_settings, site_packages, write_wheel

pytestmark = pytest.mark.environments

OLD, NEW = "1.2.3", "1.3.0"
# The variables under which a child runs this checkout's tool, wherever it is installed from.
THIS_TOOL = {"PYTHONPATH": str(CHECKOUT)}


@dataclass(frozen=True)
class Two:
    """Two bases below one root, a mirror with their stock wheels and dependencies, and a local series for each."""

    root: Path
    mirror: Path
    own: dict[str, Path]

    def request(self, venv: Path, **more: Any) -> Request:
        return Request(python=venv, **more)

    def plan(self, venv: Path, to: str | None = None, *, drop_local: bool = False, **more: Any) -> UpgradePlan:
        return plan_upgrade(self.root, self.request(venv, **more), to, drop_local=drop_local)

    def put(self, venv: Path, base: str, **more: Any) -> Installation:
        return install(plan_install(self.root, Request(python=venv, device="cpu", base=base, **more)), Quiet())

    def release(self, base: str) -> None:
        """Make another version of a base's series: what was installed from it can no longer be built."""
        pins = self.root / base / "upstream.toml"
        pins.write_text(pins.read_text().replace("number = 1", "number = 2"))


def _new_series(upstream: FakeUpstream) -> None:
    """The engine patch as it is, the odd files' patch with other content, one more; none drops of the old ones."""
    engine = upstream.file("python/sglang/engine.py")
    edit = {"python/sglang/engine.py": engine.replace(b"line 20\n", b"line twenty\n")}
    upstream.add_patch("better-engine", edit, {"Applies-To": ">=1.2.3"})
    upstream.add_patch("tables", {"python/sglang/table.json": b'{"a": 3}\n'}, {"Applies-To": f"=={NEW}"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("upgrade")
    old = patched(FakeUpstream(folder / "old", OLD))
    old.pin(release=True)
    new = FakeUpstream(folder / "new", NEW)
    _new_series(new)
    new.pin(release=True)
    mirror = folder / "mirror"
    mirror.mkdir()
    for number, upstream in enumerate((old, new), start=1):
        shutil.copy(upstream.wheel, mirror)
        wheel = write_wheel(mirror, "tinydep", f"{number}.0", {"tinydep.py": b"VALUE = %d\n" % number})
        engine = Engine(upstream.root, upstream.version, upstream.wheel, Path(), "", mirror)
        engine.lock(wheel)
    own = {OLD: own_series(old, folder / "own-old"), NEW: own_series(new, folder / "own-new")}
    shutil.copytree(new.base, old.root / NEW)
    return Two(old.root, mirror, own)


@pytest.fixture
def two(made: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    for name, value in offline_settings(made.mirror, tmp_path / "cache"):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr("sglang_bw.fork.install_plan.driver_version", lambda: None)
    (tmp_path / "work" / "dist").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    shutil.copytree(made.root, tmp_path / "patches")
    return dataclasses.replace(made, root=tmp_path / "patches")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return make_venv(tmp_path / "venv")


def bw(command: str, *more: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command line that the tool has printed, or one like it."""
    words = shlex.split(command.removeprefix("sglang-bw "))
    full = [sys.executable, "-m", "sglang_bw", *words, *map(str, more)]
    return run_tool(full)


def run_tool(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=THIS_TOOL | os.environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def installed(venv: Path) -> dict[str, str]:
    return Environment.probe(venv).installed


# --- comparing


def record(file: str, sha256: str) -> PatchRecord:
    return PatchRecord(file=file, subject=file, upstream_status="Pending", why="x", sha256=sha256)


def test_patches_are_told_by_bytes_then_by_topic() -> None:
    old = [record("0001-a.patch", "1"), record("0002-b.patch", "2"), record("0003-c.patch", "3")]
    new = [record("0001-c.patch", "3"), record("0002-b.patch", "9"), record("0003-d.patch", "4")]
    changes = compare(old, new)
    assert [patch.file for patch in changes.dropped] == ["0001-a.patch"]
    assert [(a.file, b.file, b.sha256) for a, b in changes.changed] == [("0002-b.patch", "0002-b.patch", "9")]
    assert [patch.file for patch in changes.added] == ["0003-d.patch"]
    assert [patch.file for patch in changes.kept] == ["0001-c.patch"]


def test_topic_that_comes_twice_is_counted_each_time() -> None:
    old = [record("0001-a.patch", "1"), record("0002-a.patch", "2")]
    changes = compare(old, [record("0001-a.patch", "3")])
    assert [patch.file for patch in changes.dropped] == ["0001-a.patch"]
    assert [(a.file, b.file) for a, b in changes.changed] == [("0002-a.patch", "0001-a.patch")]
    assert len(compare([], old).added) == 2


# --- there and back


def test_upgrade_and_the_way_back_that_it_tells(two: Two, venv: Path) -> None:
    two.put(venv, OLD)
    plan = two.plan(venv)
    assert (plan.word, plan.install.device, plan.install.version) == ("upgrade", "cpu", f"{NEW}+bw.1")
    assert [patch.topic for patch in plan.patches.dropped] == ["odd-files"]
    assert [new.topic for _, new in plan.patches.changed] == ["better-engine"]
    assert [patch.topic for patch in plan.patches.added] == ["tables"]
    found = upgrade(plan, Quiet())
    assert (found.intact, found.version) == (True, f"{NEW}+bw.1")
    assert installed(venv) == {"sglang": f"{NEW}+bw.1", "tinydep": "2.0"}
    (command,) = plan.back.commands
    done = bw(command, "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("downgrade")
    assert installed(venv) == {"sglang": f"{OLD}+bw.1", "tinydep": "1.0"}
    assert inspect(venv).intact


def test_command_says_everything_first_and_asks(two: Two, venv: Path, tmp_path: Path) -> None:
    two.put(venv, OLD)
    command = f"sglang-bw upgrade --python {venv} --patches {two.root}"
    said = bw(command, "--dry-run")
    assert said.returncode == 0, said.stderr
    for text in (
        f"upgrade: sglang {OLD}+bw.1 -> {NEW}+bw.1",
        "dropped  0002-odd-files.patch: It stops hurting.",
        "changed  0001-better-engine.patch: ",
        "new      0002-tables.patch",
        "packages that change: tinydep 1.0 -> 2.0",
        f"sglang-bw upgrade {OLD}+bw.1 --device cpu --python {venv}",
        "nothing was downloaded or changed",
    ):
        assert text in said.stdout
    refused = bw(command)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert installed(venv)["sglang"] == f"{OLD}+bw.1"
    facts = json.loads(bw(command, "--dry-run", "--json").stdout)
    assert (facts["what"], facts["to"], facts["replaces"]) == ("upgrade", f"{NEW}+bw.1", {"tinydep": ["1.0", "2.0"]})
    done = bw(command, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verify"]["intact"]
    again = bw(command)
    assert "nothing to do" in again.stdout


def test_recipes_of_the_user_are_looked_at(two: Two, venv: Path) -> None:
    two.put(venv, OLD)
    Path("mine.yaml").write_text(
        "id: mine\ntarget: {id: a/b}\nengine: {sglang: '<1.3'}\nargs: {no-such-flag-anywhere: 3}\n"
        f"evidence: [{{what: a run, source: us, engine: SGLang {OLD}}}, {{what: more, source: us, engine: v{NEW}}}]\n"
    )
    Path("other.yaml").write_text("jobs: {}\n")
    Path("broken.yaml").write_text("id: broken\ntarget: [1]\n")
    facts = json.loads(bw(f"sglang-bw upgrade --python {venv} --patches {two.root} --dry-run --json").stdout)
    broken, mine = facts["recipes"]
    assert (broken["recipe"], "finding" in broken["problem"]) == ("broken.yaml", True)
    assert mine["problem"] == f"it is for sglang <1.3, which leaves out {NEW}"
    assert [flag["flag"] for flag in mine["flags"]] == [["--no-such-flag-anywhere", "3"]]
    assert mine["stale_evidence"] == [f"a run (us): measured with SGLang {OLD}"]
    shown = bw(f"sglang-bw upgrade --python {venv} --patches {two.root} --dry-run --recipe mine.yaml").stdout
    assert "unknown: --no-such-flag-anywhere" in shown
    assert "stale evidence: a run" in shown
    assert "broken.yaml" not in shown


def test_engine_that_nobody_can_build_again_is_kept(two: Two, venv: Path) -> None:
    before = two.put(venv, OLD)
    shutil.rmtree("dist")
    Path("dist").mkdir()
    two.release(OLD)
    plan = two.plan(venv)
    assert plan.back.keep
    upgrade(plan, Quiet())
    done = bw(plan.back.commands[0], "--yes")
    assert done.returncode == 0, done.stderr
    again = inspect(venv)
    assert (again.intact, again.version, again.digest) == (True, f"{OLD}+bw.1", before.digest)
    assert installed(venv)["tinydep"] == "1.0"


@pytest.mark.slow
def test_wheel_that_is_still_there_is_the_way_back(two: Two, venv: Path) -> None:
    before = two.put(venv, OLD)
    two.release(OLD)
    plan = two.plan(venv)
    assert (plan.back.keep, "--wheel" in plan.back.commands[0]) == (False, True)
    upgrade(plan, Quiet())
    os.chdir("/")
    done = bw(plan.back.commands[0], "--yes")
    assert done.returncode == 0, done.stderr
    assert inspect(venv).digest == before.digest


def test_kept_engine_is_the_wheel_that_was_installed(two: Two, venv: Path) -> None:
    found = two.put(venv, OLD)
    kept = PatchedWheel.open(keep(found))
    kept.validate()
    assert (kept.digest, kept.version) == (found.digest, found.version)
    stamp = kept.path.stat().st_mtime_ns
    assert keep(found).stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_from_stock_and_back_to_it(two: Two, venv: Path) -> None:
    shutil.unpack_archive(next(two.mirror.glob(f"sglang-{OLD}-*")), site_packages(venv), "zip")
    plan = two.plan(venv, device="cpu")
    assert (plan.before.state, plan.patches.dropped, len(plan.patches.added)) == (State.STOCK, (), 2)
    upgrade(plan, Quiet())
    for command in plan.back.commands:
        done = bw(command, *(["--yes"] if " upgrade " in command else []))
        assert done.returncode == 0, done.stderr
    assert inspect(venv).state is State.STOCK
    assert installed(venv) == {"sglang": OLD, "tinydep": "1.0"}


def test_way_back_to_stock_is_taken_by_the_tool_when_torch_has_an_index(two: Two, venv: Path) -> None:
    shutil.unpack_archive(next(two.mirror.glob(f"sglang-{OLD}-*")), site_packages(venv), "zip")
    plan = two.plan(venv, device="cpu", torch_index="https://torch.example/cpu")
    assert [" --torch-index " in command for command in plan.back.commands] == [True, False]
    done = bw(plan.back.commands[-1], "--dry-run")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        ({"url": "file:///a/b", "dir_info": {"editable": True}}, "-e /a/b"),
        ({"url": "file:///a/b", "dir_info": {}}, "/a/b"),
        (
            {"url": "https://h/r.git", "subdirectory": "python", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "'git+https://h/r.git@ab12#subdirectory=python'",
        ),
    ],
)
def test_way_back_to_sources_is_to_install_them(two: Two, venv: Path, origin: dict[str, Any], wanted: str) -> None:
    shutil.unpack_archive(next(two.mirror.glob(f"sglang-{OLD}-*")), site_packages(venv), "zip")
    (site_packages(venv) / f"sglang-{OLD}.dist-info/direct_url.json").write_text(json.dumps(origin))
    plan = two.plan(venv, device="cpu")
    assert plan.back.commands == (f"python -m pip --python {venv}/bin/python install {wanted}",)


def test_full_version_that_nothing_makes(two: Two, venv: Path) -> None:
    two.put(venv, OLD)
    for to, text in (("1.3.0+bw.9", "the series of 1.3.0 makes 1.3.0\\+bw.1"), ("9.9", "no patch series"), ("x", "x")):
        with pytest.raises(UnknownBaseError, match=text):
            two.plan(venv, to)


def test_nothing_to_start_from(two: Two, venv: Path) -> None:
    with pytest.raises(NotInstalledError, match="nothing to upgrade"):
        two.plan(venv)


def test_refusals_are_those_of_an_install(two: Two, venv: Path, tmp_path: Path) -> None:
    two.put(venv, OLD)
    old = fake_interpreter(tmp_path / "python", version=[3, 8, 1], prefix=str(venv),
                           purelib=str(site_packages(venv)), sys_path=[str(site_packages(venv))])  # fmt: skip
    with pytest.raises(RefusedError, match=r"Python 3\.8\.1"):
        two.plan(old)


# --- local patches


def test_local_patches_are_never_lost_silently(two: Two, venv: Path) -> None:
    found = two.put(venv, OLD, local=two.own[OLD])
    assert ".local." in found.version
    with pytest.raises(LocalPatchesLostError, match=r"0001-faster\.patch: Faster") as caught:
        two.plan(venv)
    assert f"rebase {NEW} --local DIR" in caught.value.hint
    dropped = two.plan(venv, drop_local=True)
    assert [patch.topic for patch in dropped.local.dropped] == ["faster", "table"]
    plan = two.plan(venv, local=two.own[NEW])
    assert plan.install.version == f"{NEW}+bw.1.local.<tree>"
    assert [new.topic for _, new in plan.local.changed] + [patch.topic for patch in plan.local.kept] == [
        "faster",
        "table",
    ]
    there = upgrade(plan, Quiet())
    assert there.version.startswith(f"{NEW}+bw.1.local.")
    assert two.plan(venv, local=two.own[NEW]).install.nothing_to_do
    done = bw(plan.back.commands[0], "--yes")
    assert done.returncode == 0, done.stderr
    assert inspect(venv).digest == found.digest


@pytest.mark.slow
def test_install_of_a_local_series_and_of_the_plain_one_over_it(two: Two, venv: Path) -> None:
    two.put(venv, NEW)
    found = two.put(venv, NEW, local=two.own[NEW])
    assert (found.intact, ".local." in found.version) == (True, True)
    plan = plan_install(two.root, Request(python=venv, device="cpu", local=two.own[NEW]))
    assert plan.nothing_to_do
    plain = plan_install(two.root, Request(python=venv, device="cpu"))
    assert "local patches, which go (0001-faster.patch, 0002-table.patch)" in plain.notes[0]
    assert install(plain, Quiet()).version == f"{NEW}+bw.1"
    shutil.rmtree("dist/simple")
    newest = plan_install(two.root, Request(python=venv, device="cpu", find_links=Path("dist"))).wheel
    assert newest is not None
    assert newest.version == f"{NEW}+bw.1"
    with pytest.raises(RefusedError, match="does not hold the patches of"):
        plan_install(two.root, Request(python=venv, device="cpu", wheel=newest.path, local=two.own[NEW]))


# --- what goes wrong


def test_failure_tells_what_is_there_and_the_way_back(
    two: Two, venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.put(venv, OLD)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    built = build(two.root, NEW, wheel=next(two.mirror.glob(f"sglang-{NEW}-*")), out=Path("dist"))
    assert built.path.is_file()
    plan = two.plan(venv)
    with pytest.raises(DownloadError) as caught:
        upgrade(plan, Quiet())
    assert f"there is now sglang {OLD}+bw.1 (intact), and 0 other packages are changed" in caught.value.hint
    assert plan.back.commands[0] in caught.value.hint
    assert inspect(venv).intact


def test_engine_that_is_not_intact_afterwards_is_an_error_with_the_way_back(
    two: Two, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.put(venv, OLD)
    plan = two.plan(venv)

    def spoilt(plan: Any, report: Any) -> Installation:
        install(plan, report)
        (site_packages(venv) / "sglang/engine.py").write_text("spoilt\n")
        return inspect(venv)

    monkeypatch.setattr("sglang_bw.fork.upgrade.install", spoilt)
    with pytest.raises(BwError, match="not what was built") as caught:
        upgrade(plan, Quiet())
    assert plan.back.commands[0] in caught.value.hint


@pytest.mark.slow
def test_killed_upgrade_goes_on(two: Two, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two.put(venv, OLD)
    files = {f"bulky/m{n}.py": b"".join(b"def f%d(): return %d\n" % (i, i) for i in range(150)) for n in range(300)}
    mirror = Path("mirror")
    shutil.copytree(two.mirror, mirror)
    engine = Engine(two.root, NEW, Path(), Path(), "", mirror)
    engine.lock(write_wheel(mirror, "bulky", "1.0", files), next(mirror.glob("tinydep-2.0*")))
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror.resolve()))
    command = [sys.executable, "-m", "sglang_bw", "upgrade", "--patches", two.root, "--python", venv, "--yes"]
    with subprocess.Popen(
        list(map(str, command)), env=THIS_TOOL | os.environ, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as tool:  # fmt: skip
        deadline = time.monotonic() + 120
        while not (site_packages(venv) / "bulky/m0.py").exists():
            assert tool.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(tool.pid, signal.SIGKILL)
    done = run_tool(list(map(str, command)))
    assert done.returncode == 0, done.stderr
    assert inspect(venv).version == f"{NEW}+bw.1"
    assert installed(venv)["bulky"] == "1.0"
