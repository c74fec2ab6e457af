"""What `probe allreduce` keeps, where, and how it ends; the ranks' own words are made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from click.testing import Result as Ran

from sglang_bw.cli.probe import probe
from sglang_bw.errors import AllReduceError, OutputError, ProbeError
from sglang_bw.host import fingerprint, probes
from sglang_bw.launch.probe import variants
from sglang_bw.launch.probe.allreduce import Latency, Result, measure
from sglang_bw.launch.probe.sizes import Sizes
from sglang_bw.launch.probe.torchrun import Job, Run
from tests.launch.serving import write_tree
from tests.probe.test_rounds import HOST

Event = dict[str, Any]
START: Event = {"event": "start", "torch": "2"}
HUNG: Event = {"event": "hung", "reason": "no sign of life for 120 s"}
DIED: Event = {"event": "died", "reason": "exit code 1"}
FAILED: Event = {"event": "failed", "reason": "RuntimeError: the cause"}
KIMI = "kimi-k2.5-int4-eagle3"


def size(rows: int, microseconds: float = 10.0, *, graph: bool = False) -> Event:
    times = {"microseconds": microseconds, "microseconds_p90": 12.0, "repetitions": 20}
    return {"event": "size", "rows": rows, "bytes": rows * 128, "graph": graph, **times}


def absent(rows: int) -> Event:
    return {"event": "absent", "reason": f"{rows} rows eagerly: left to NCCL"}


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Let ways tell something; what is not named tells nothing and ends well."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))

    def set_up(**ways: list[Event]) -> None:
        def events(run: Run, _relay: Any) -> Iterator[Event]:
            yield from ways.get(run.variant.name, [])

        monkeypatch.setattr(Run, "events", events)

    return set_up


def found(keep: Callable[[Result], None] = lambda _: None, device: str = "cpu") -> Result:
    result = Result(Job(device, 2, 64, (1, 4)), HOST)
    ways = variants.choose(device, [])
    return measure(result, ways, Path(sys.executable), {}, tell=lambda _: None, keep=keep)


def run(tmp_path: Path, *words: str) -> Ran:
    tree = tmp_path / "tree"
    if not tree.is_dir():
        write_tree(tree)
    return CliRunner().invoke(probe, ["allreduce", "--engine-tree", str(tree), *words])


def on_cpu(tmp_path: Path, *words: str) -> Ran:
    return run(tmp_path, "--device", "cpu", "--hidden", "64", "--gpus", "2", *words)


def dry(tmp_path: Path, *words: str) -> Any:
    ran = run(tmp_path, *words, "--dry-run", "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_every_size_is_kept_as_it_comes(tell: Callable[..., None]) -> None:
    tell(gloo=[START, size(1), size(4)])
    kept: list[tuple[int, bool]] = []
    found(lambda result: kept.append((len(result.latencies), result.complete)))
    assert kept == [(1, False), (2, False), (2, False), (2, True)]


def test_a_probe_that_is_ended_says_where_its_sizes_are(tell: Callable[..., None], tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    tell(gloo=[START, size(1), size(4)])
    assert on_cpu(tmp_path, "--out", str(place)).exit_code == 0
    whole = place.read_text()
    tell(gloo=[START, size(1), {"event": "interrupted"}])
    ran = on_cpu(tmp_path, "--out", str(place))
    assert ran.exit_code != 0
    assert f"what was measured: {probes.partial(place)}" in ran.stderr
    assert place.read_text() == whole
    left = json.loads(probes.partial(place).read_text())
    assert ([row["rows"] for row in left["latencies"]], left["complete"]) == ([1], False)


def test_a_run_that_measures_nothing_leaves_an_earlier_result(tell: Callable[..., None], tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    tell(gloo=[START, size(1), size(4)])
    on_cpu(tmp_path, "--out", str(place))
    whole = place.read_text()
    for nothing in ([START, absent(1)], [START, HUNG], [DIED]):
        tell(gloo=nothing)
        ran = on_cpu(tmp_path, "--out", str(place))
        assert isinstance(ran.exception, ProbeError | AllReduceError)
        assert "stored: " not in ran.stderr
        assert place.read_text() == whole
        assert json.loads(probes.partial(place).read_text())["complete"] is False


def test_some_rows_or_ways_have_a_file_of_their_own(tmp_path: Path) -> None:
    sizes = ("--hidden", "64", "--gpus", "2", "--device", "cpu")
    whole = Path(dry(tmp_path, *sizes)["out"])
    parts = {dry(tmp_path, *sizes, *more)["out"] for more in (("--rows", "1"), ("--backend", "gloo"))}
    assert parts == {str(whole.with_name(f"{whole.stem}-part.json"))}
    assert whole == probes.place("allreduce", fingerprint.take().key, "2x64", "cpu")


@pytest.mark.parametrize(
    ("events", "kinds", "error"),
    [
        pytest.param([START, absent(1), HUNG], ["absent", "hung"], AllReduceError, id="hung behind an absent size"),
        pytest.param([START, absent(1), DIED], ["absent", "died"], AllReduceError, id="died behind an absent size"),
        pytest.param([START, FAILED, DIED], ["died"], AllReduceError, id="told why"),
        pytest.param([START, FAILED, HUNG], ["died", "hung"], AllReduceError, id="told why and hung"),
        pytest.param([START, absent(1), size(2), absent(4)], ["absent", "absent"], None, id="two sizes absent"),
        pytest.param([DIED], ["unstarted"], ProbeError, id="died before it began"),
        pytest.param([{"event": "import"}, HUNG], ["unstarted"], ProbeError, id="hung before it began"),
    ],
)
def test_no_end_of_a_way_is_lost(
    tell: Callable[..., None], events: list[Event], kinds: list[str], error: type[Exception] | None
) -> None:
    tell(gloo=events)
    result = found()
    assert [row.kind for row in result.failures] == kinds
    assert "RuntimeError: the cause" in [row.reason for row in result.failures] or FAILED not in events
    assert isinstance(result.error(), error) if error else result.error() is None


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("no sign of life for 3 s", "--timeout"),
        ("python: Error while finding module specification (ModuleNotFoundError: No module named 'torch')", "--python"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "nvidia-smi"),
        ("something else", "sglang-bw doctor"),
    ],
)
def test_ranks_that_never_came_up_say_nothing_of_the_way(tell: Callable[..., None], reason: str, hint: str) -> None:
    tell(nccl=[{"event": "died", "reason": reason}], custom=[{"event": "died", "reason": reason}])
    error = found(device="cuda").error()
    assert isinstance(error, ProbeError)
    assert error.message == f"no rank came up: nccl, custom: {reason}"
    assert hint in (error.hint or "")
    assert "measured" not in f"{error}"
    tell(nccl=[START, size(1, graph=True)], custom=[{"event": "died", "reason": reason}])
    error = found(device="cuda").error()
    assert isinstance(error, ProbeError)
    assert "the others were measured and stored" in error.message


def test_the_hint_claims_no_measurement_that_is_none(tell: Callable[..., None]) -> None:
    tell(nccl=[START, HUNG])
    alone = found(device="cuda").error()
    assert alone
    assert alone.hint == "do not serve with these."
    tell(nccl=[START, HUNG], custom=[START, size(1)])
    beside = found(device="cuda").error()
    assert beside
    assert "the others were measured" in (beside.hint or "")


@pytest.mark.engine
def test_an_environment_without_torch(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = ("--python", str(tmp_path / "venv/bin/python"), "--out", str(tmp_path / "found.json"))
    ran = CliRunner().invoke(probe, ["allreduce", "--device", "cpu", "--hidden", "64", "--gpus", "2", *python])
    assert isinstance(ran.exception, ProbeError), ran.output
    assert "torch" in ran.exception.message
    assert "sglang-bw install" in (ran.exception.hint or "")
    assert not (tmp_path / "found.json").exists()


def environ_of(told: Any, way: str) -> Mapping[str, str]:
    found: Mapping[str, str] = told["backends"][way]
    return found


def test_ways_have_what_the_recipe_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    told = dry(tmp_path, KIMI, "--device", "cuda")
    plain = {"NCCL_P2P_LEVEL": "SYS", "NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_CUMEM_ENABLE": "0"}
    assert plain.items() <= environ_of(told, "nccl").items()
    assert environ_of(told, "nccl-ll")["NCCL_P2P_LEVEL"] == "SYS"
    assert environ_of(told, "nccl-p2p-loc")["NCCL_P2P_LEVEL"] == "LOC"
    assert environ_of(dry(tmp_path, "--hidden", "64", "--gpus", "2", "--device", "cuda"), "nccl")["NCCL_ALGO"] == "Ring"


def test_a_variable_of_the_shell_wins_over_the_recipes_and_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_LEVEL", "PHB")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    told = dry(tmp_path, KIMI, "--device", "cuda")
    assert environ_of(told, "nccl")["NCCL_P2P_LEVEL"] == "PHB"
    assert environ_of(told, "nccl")["NCCL_CUMEM_ENABLE"] == "1"
    assert environ_of(told, "nccl-symm-mem")["NCCL_NVLS_ENABLE"] == "1"


def test_ranks_get_it_and_the_result_tells_it(
    tell: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_bw.launch.device.gpu_count", lambda: 8)
    given: dict[str, Mapping[str, str]] = {}

    def events(run: Run, _relay: Any) -> Iterator[Event]:
        given[run.variant.name] = run.environ
        yield from (START, size(1, graph=True))

    monkeypatch.setattr(Run, "events", events)
    ran = run(tmp_path, KIMI, "--device", "cuda", "--out", str(tmp_path / "found.json"), "--json")
    assert ran.exit_code == 0, ran.output
    assert given["nccl"]["NCCL_P2P_LEVEL"] == "SYS"
    assert given["nccl-p2p-loc"]["NCCL_P2P_LEVEL"] == "LOC"
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["backends"].keys() == given.keys()
    assert told["backends"]["nccl"].items() <= given["nccl"].items()
    assert told["backends"]["nccl"]["NCCL_IB_DISABLE"] == "1"


def test_the_place_is_tried_first(tell: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(Run, "events", lambda *_: pytest.fail("a way was started"))
    nowhere = ("--out", str(tmp_path / "file" / "found.json"))
    assert isinstance(on_cpu(tmp_path, *nowhere).exception, OutputError)
    assert on_cpu(tmp_path, *nowhere, "--dry-run").exit_code == 0
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_stored_is_shown(
    tell: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    tell(gloo=[START, size(1, 31.5), size(4, 62.5)])
    store = probes.store

    def full(place: Path, result: dict[str, Any]) -> None:
        if result["complete"]:
            raise OutputError(f"cannot write {place}: No space left on device")
        store(place, result)

    monkeypatch.setattr(probes, "store", full)
    ran = on_cpu(tmp_path, "--out", str(tmp_path / "found.json"), *(["--json"] if as_json else []))
    assert isinstance(ran.exception, OutputError)
    shown = [row["microseconds"] for row in json.loads(ran.stdout)["latencies"]] if as_json else ran.stdout.split()
    assert {31.5, 62.5} <= {float(word) for word in shown if str(word).replace(".", "").isdigit()}
    assert "found.partial.json" in ran.stderr


def test_a_dry_run_knows_what_a_plan_knows(tell: Callable[..., None], tmp_path: Path) -> None:
    told = dry(tmp_path, KIMI, "--device", "cuda")
    assert (told["hidden"], told["gpus"]) == (7168, 8)


def test_a_dry_run_refuses_one_rank_as_the_run_does(tmp_path: Path) -> None:
    ran = run(tmp_path, "tiny", "--device", "cpu", "--dry-run")
    assert isinstance(ran.exception, ProbeError)
    assert "one GPU reduces nothing" in ran.exception.message


def test_json_has_what_the_table_has() -> None:
    result = Result(Job("cuda", 8, 7168, (1, 4)), HOST, sizes=Sizes(8, 7168, (1, 4), 4))
    result.latencies.append(Latency("nccl", 4, 57344, True, 30.0, 31.0, 20))
    told = result.as_json()
    assert (tuple(told["batches"]), told["draft_tokens"]) == ((1, 4), 4)
    assert told["sizes"] == [
        {"rows": 1, "bytes": 14336, "in": "decode 1", "fastest": None},
        {"rows": 4, "bytes": 57344, "in": "decode 4, verify 1", "fastest": "nccl"},
    ]


def test_the_fastest_way_is_that_of_the_table() -> None:
    result = Result(Job("cuda", 2, 64, (1,)), HOST)
    result.latencies += [
        Latency("nccl", 1, 128, True, 20.0, 21.0, 20),
        Latency("custom", 1, 128, True, 30.0, 31.0, 20),
        Latency("custom", 1, 128, False, 5.0, 6.0, 20),
    ]
    assert {name: number.value for name, number in result.numbers().items()} == {"1 rows by nccl": 20.0}
    assert {way: row.microseconds for way, row in result.at(1).items()} == {"nccl": 20.0, "custom": 30.0}


def test_rows_of_thousands_of_digits_are_wrong_usage(tmp_path: Path) -> None:
    ran = run(tmp_path, "tiny", "--rows", "0" * 5000)
    assert ran.exit_code == 2
    assert "no list of whole numbers" in ran.output
    assert len(ran.output) < 1000
