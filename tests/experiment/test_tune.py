"""The search itself, on a bench whose speeds are known; the servers are in tests/engine/test_tune_real.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.cli import tune_view
from sglang_bw.cli.experiment import ab as ab_command
from sglang_bw.cli.tune import tune as tune_command
from sglang_bw.errors import BwError, TuneError
from sglang_bw.experiment import prompts, tune, tuned
from sglang_bw.experiment import space as spaces
from sglang_bw.experiment.arm import Arm, ArmPlan
from sglang_bw.experiment.bench import ServerBench
from sglang_bw.experiment.client import Sampling
from sglang_bw.experiment.settings import Settings
from sglang_bw.experiment.space import AS_IS, OFF, Choice, Setting, Space
from sglang_bw.experiment.tune import IsDecided, Score, Tried, Tuning
from sglang_bw.experiment.verdict import Limits
from sglang_bw.host import fingerprint
from sglang_bw.launch import command as commands
from sglang_bw.launch import engine as engines
from sglang_bw.launch.command import Command
from sglang_bw.ledger.entry import Entry, new_id, of_run
from sglang_bw.ledger.failure import FailureClass
from sglang_bw.ledger.query import Query
from sglang_bw.ledger.record import Block, Outcome, RequestRow, RunRecord
from sglang_bw.ledger.store import PATH_VARIABLE, Ledger
from sglang_bw.recipes import flags, lookup
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe
from tests.experiment.conftest import Silent, StartMock
from tests.ledger.runs import BEGAN, ratio, run

SPACE = Space((Setting("steps", (AS_IS, "1", "2", OFF)), Setting("max-running-requests", (AS_IS, "4", "8"))))
SPEEDS = {"1": 1.05, "2": 1.2, OFF: 0.6, "4": 0.9, "8": 1.1, AS_IS: 1.0}


@dataclass
class SimulatedBench:
    """A choice's speed is the product of its settings' speeds; every trial ends when it is decided."""

    refused: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    noise: float = 0.002
    asked: list[str] = field(default_factory=list)
    rounds: dict[str, int] = field(default_factory=dict)

    def refusal(self, choice: Choice) -> Entry | None:
        if not set(choice.values()) & set(self.refused):
            return None
        return self._entry("refused", "the plan refuses it")

    def compare(self, choice: Choice, is_decided: IsDecided) -> tuple[RunRecord | None, Entry]:
        says = spaces.says(choice)
        assert says not in self.asked, "tried twice"
        self.asked.append(says)
        if set(choice.values()) & set(self.failing):
            return None, self._entry("failed", "it does not start")
        speed = math.prod(SPEEDS[value] for value in choice.values())
        dice = random.Random(says)
        for rounds in range(2, 40, 2):
            half = 0.2 / rounds
            value = speed * math.exp(dice.gauss(0, self.noise))
            update = {"value": value, "low": value - half, "high": value + half, "rounds": rounds}
            ratios = (ratio(1, speed).model_copy(update=update),)
            if is_decided(ratios, ()):
                break
        self.rounds[says] = rounds
        outcome = Outcome(ended=BEGAN, valid=True, ratios=ratios)
        found = run(new_id(datetime.now(UTC)), outcome=outcome, command="trial")
        return found, of_run(found)

    @staticmethod
    def _entry(result: str, why: str) -> Entry:
        now = datetime.now(UTC)
        fields = {
            "id": new_id(now),
            "kind": "trial",
            "at": now,
            "result": result,
            "evidence": (why,),
            "failure": "other",
        }
        return Entry.model_validate(fields)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_finds_the_fastest_and_tries_nothing_twice(ledger: Ledger) -> None:
    bench = SimulatedBench()
    tried = Tuning("s", SPACE, bench, ledger).run()
    assert len(tried) == SPACE.size - 1  # the recipe as it is needs no trial
    winner = tune.best(tried)
    assert winner
    assert winner.choice == {"steps": "2", "max-running-requests": "8"}
    assert winner.score
    assert winner.score.value == pytest.approx(1.32, rel=0.02)
    assert bench.asked[:5] == ["steps 1", "steps 2", "steps off", "max-running-requests 4", "max-running-requests 8"]


def test_a_loser_is_given_up_early(ledger: Ledger) -> None:
    bench = SimulatedBench()
    Tuning("s", SPACE, bench, ledger, within=0.01).run()
    assert bench.rounds["steps off"] == 4
    assert bench.rounds["steps 2"] > 10


def test_refusals_and_failures_are_results(ledger: Ledger) -> None:
    bench = SimulatedBench(refused=("2",), failing=("8",))
    tried = Tuning("s", SPACE, bench, ledger).run()
    results = {spaces.says(one.choice): one.result for one in tried}
    assert results["steps 2"] == "refused"
    assert results["max-running-requests 8"] == "failed"
    assert not any("steps 2" in says for says in bench.asked)  # never started
    winner = tune.best(tried)
    assert winner
    assert winner.choice == {"steps": "1", "max-running-requests": AS_IS}
    assert {one.study for one in ledger.select()} == {"s"}


def test_goes_on_where_it_stopped(ledger: Ledger) -> None:
    first, second = SimulatedBench(), SimulatedBench()
    Tuning("s", SPACE, first, ledger, most=4).run()
    assert len(first.asked) == 4
    tried = Tuning("s", SPACE, second, ledger).run()
    assert len(tried) == SPACE.size - 1
    assert not set(first.asked) & set(second.asked)
    other = SimulatedBench()
    Tuning("another", SPACE, other, ledger, most=2).run()
    assert len(other.asked) == 2


def test_trials_of_another_search_are_not_taken_for_its_own(ledger: Ledger) -> None:
    Tuning("s", SPACE, SimulatedBench(), ledger, most=2, search="launch a").run()
    other = Space((Setting("steps", (AS_IS, "1", "8")),))
    foreign = Space((Setting("page-size", (AS_IS, "1")),))
    bench = SimulatedBench()
    for space, search in ((SPACE, "launch b"), (other, "launch a"), (foreign, "launch a")):
        with pytest.raises(TuneError, match="trials of another search"):
            Tuning("s", space, bench, ledger, search=search).run()
    assert bench.asked == []
    assert len(Tuning("s", SPACE, bench, ledger, most=3, search="launch a").run()) == 3


def test_an_interrupted_trial_is_tried_again(ledger: Ledger) -> None:
    class Interrupted(SimulatedBench):
        def compare(self, choice: Choice, is_decided: IsDecided) -> tuple[RunRecord | None, Entry]:
            if len(self.asked) == 2:
                raise KeyboardInterrupt
            return super().compare(choice, is_decided)

    with pytest.raises(KeyboardInterrupt):
        Tuning("s", SPACE, Interrupted(), ledger).run()
    bench = SimulatedBench()
    tried = Tuning("s", SPACE, bench, ledger).run()
    assert bench.asked[0] == "steps off"
    assert len(tried) == SPACE.size - 1


def test_the_budget_ends_it(ledger: Ledger) -> None:
    assert Tuning("s", SPACE, SimulatedBench(), ledger, budget_s=0).run() == []


def test_nothing_wins_by_chance(ledger: Ledger) -> None:
    narrow = Space((Setting("steps", (AS_IS, OFF)),))
    tried = Tuning("s", narrow, SimulatedBench(), ledger).run()
    assert tune.best(tried) is None
    close = Tried({}, "undecided", Score(1.02, 0.99, 1.05), "", "")
    assert tune.best([close]) is None


def test_a_run_that_is_not_valid_has_no_score(ledger: Ledger) -> None:
    class Drifting(SimulatedBench):
        def compare(self, choice: Choice, is_decided: IsDecided) -> tuple[RunRecord | None, Entry]:
            found, entry = super().compare(choice, is_decided)
            if found is None or found.outcome is None or spaces.says(choice) != "steps 2":
                return found, entry
            outcome = found.outcome.model_copy(update={"valid": False, "warnings": ("it drifted",)})
            found = found.model_copy(update={"outcome": outcome})
            return found, of_run(found)

    bench = Drifting()
    narrow = Space((Setting("steps", (AS_IS, "2", "1")),))
    tuning = Tuning("s", narrow, bench, ledger, within=0.01)
    tried = tuning.run()
    drifted = next(one for one in tried if one.choice == {"steps": "2"})
    assert (drifted.result, drifted.score, drifted.why) == ("invalid", None, "it drifted")
    assert bench.rounds["steps 1"] > 4  # not given up against a speed that nobody may use
    found = tune.best(tried)
    assert found
    assert found.choice == {"steps": "1"}
    again = Tuning("s", narrow, SimulatedBench(), ledger).run()
    assert next(one for one in again if one.choice == {"steps": "2"}).score is None


def test_goodput_counts_requests_within_the_limits(ledger: Ledger) -> None:
    found = run()
    tuning = Tuning("s", SPACE, SimulatedBench(), ledger, metric="goodput", limits=Limits(tpot_s=0.0089))
    assert found.outcome
    score = tuning._score(found.outcome.ratios, found.blocks)
    assert score
    assert score.value > 5  # A keeps the limit never, B always: half a request against eight
    slower = tuple(ratio(one.concurrency, 0.5) for one in found.outcome.ratios)
    assert tuning._score(slower, found.blocks) == score  # tokens per second do not count


def test_goodput_of_nothing_good_is_no_score(ledger: Ledger) -> None:
    class Late(SimulatedBench):
        """B's blocks take half the time, and no request of either side keeps the limit."""

        def compare(self, choice: Choice, is_decided: IsDecided) -> tuple[RunRecord | None, Entry]:
            found = run(new_id(datetime.now(UTC)), command="trial")
            blocks = tuple(
                block.model_copy(update={"seconds": 2.0 if block.arm == "B" else 4.0}) for block in found.blocks
            )
            assert found.outcome
            assert is_decided(found.outcome.ratios, blocks)  # nothing will come of more rounds
            found = found.model_copy(update={"blocks": blocks})
            return found, of_run(found)

    limits = Limits(tpot_s=1e-6)
    tried = Tuning("s", SPACE, Late(), ledger, metric="goodput", limits=limits, most=2).run()
    assert [one.score for one in tried] == [None, None]
    assert "no request kept the limits" in tried[0].why
    assert tune.best(tried) is None


def test_a_trial_ends_by_its_own_metric(ledger: Ledger) -> None:
    """Goodput is known to a tenth of a percent, tokens a second hardly; and the other way round."""
    limits = Limits(tpot_s=10)
    tuning = Tuning("s", SPACE, SimulatedBench(), ledger, metric="goodput", limits=limits, within=0.01)
    found = run()
    wide = tuple(ratio(c, 1.0).model_copy(update={"low": 0.5, "high": 2.0, "rounds": 4}) for c in (1, 4, 16))
    assert tuning.is_decided(wide, found.blocks)  # every request is good, every block takes four seconds
    dice = random.Random(1)
    uneven = tuple(block.model_copy(update={"seconds": dice.uniform(1, 8)}) for block in found.blocks)
    narrow = tuple(one.model_copy(update={"low": 0.999, "high": 1.001}) for one in wide)
    assert not tuning.is_decided(narrow, uneven)


def test_rounds_without_a_good_request_do_not_count(ledger: Ledger) -> None:
    """Six rounds, and in two of them somebody kept the limits, B always twice as fast: too few to win or to end by."""
    limits = Limits(ttft_s=1.0)
    tuning = Tuning("s", SPACE, SimulatedBench(), ledger, metric="goodput", limits=limits)
    row = RequestRow(prompt="p", output_tokens=2, ttft_s=0.5, e2e_s=1.0)
    found = [
        Block(
            arm=arm, round=number, position=0, concurrency=1, began=BEGAN, seconds=seconds,
            rows=(row if number < 2 else row.model_copy(update={"ttft_s": 2.0}),),
        )
        for number in range(6)
        for arm, seconds in (("A", 2.0), ("B", 1.0))
    ]  # fmt: skip
    ratios = (ratio(1, 1.0).model_copy(update={"rounds": 6}),)
    score = tuning._score(ratios, found)
    assert score
    assert score.value == pytest.approx(2)
    assert not score.is_better
    assert not tuning.is_decided(ratios, found)


@pytest.mark.parametrize("limit", ["-1", "0", "0.0", "nan", "inf", "x"])
def test_limits_are_above_zero(limit: str) -> None:
    arguments = ["tiny", "--metric", "goodput", "--ttft", limit, "--dry-run"]
    for command, words in ((tune_command, arguments), (ab_command, ["tiny", "--goodput", f"ttft={limit}"])):
        refused = CliRunner().invoke(command, words)
        assert refused.exit_code == 2
        assert limit in refused.output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--study", "a/b"], 2, "is no name of a study"),
        (["--study", ".."], 2, "is no name of a study"),
        (["--budget", "0"], 2, "is no duration"),
        (["-o", "tuned"], 2, "ends in .yaml or .yml"),
        (["-o", "no-such-folder/tuned.yaml"], 17, "cannot write no-such-folder/tuned.yaml"),
        (["--prompts", "random"], 73, "random tokens"),
    ],
)
def test_what_would_fail_after_hours_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "ledger"))
    refused = CliRunner().invoke(tune_command, ["tiny", "--device", "cpu", "--space", "steps=1", *arguments])
    error = refused.exception
    found = (error.exit_code, error.message) if isinstance(error, BwError) else (refused.exit_code, refused.output)
    assert found[0] == code
    assert says in found[1]


def test_a_search_without_a_trial_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    tune_view.print_result("s", [], None, as_json=False)
    assert capsys.readouterr().out == "nothing was tried\n"


def test_a_trial_of_few_rounds_wins_nothing(ledger: Ledger) -> None:
    found = run()
    assert found.outcome
    few = tuple(
        one.model_copy(update={"value": 2.0, "low": 1.9, "high": 2.1, "rounds": 2}) for one in found.outcome.ratios
    )
    tuning = Tuning("s", SPACE, SimulatedBench(), ledger)
    score = tuning._score(few, found.blocks)
    assert score
    assert score.value == pytest.approx(2.0)
    assert not score.is_better


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 0.5)), min_size=1, max_size=5))
def test_scores_over_concurrencies(parts: list[tuple[float, float]]) -> None:
    scores = [Score(value, value * (1 - half), value * (1 + half)) for value, half in parts]
    found = tune.combined(scores)
    assert found
    assert min(one.value for one in scores) <= found.value * 1.0000001
    assert found.low <= found.value * 1.0000001
    assert found.value <= found.high * 1.0000001


@pytest.fixture
def server_bench(mock: StartMock, ledger: Ledger, tmp_path: Path) -> Callable[[str, str], ServerBench]:
    """Return a bench whose recipe as it is, and whose choices, are servers with the faults that are asked for."""

    def made(fault_a: str, fault_b: str) -> ServerBench:
        recipe, engine = lookup.find("tiny"), engines.find()
        servers = {"A": mock(fault=fault_a, fault_after=2), "B": mock(fault=fault_b, fault_after=2)}

        class MockBench(ServerBench):
            def _start(self, plan: ArmPlan) -> Arm:
                return Arm(replace(plan, url=servers[plan.name], command=None), None)

        def build(choice: Choice, port: int) -> Command:
            extra = flags.from_mapping({name: value for name, value in choice.items() if value != AS_IS})
            return commands.build(recipe, Hardware(device="cpu"), {}, port=port, extra=extra, version="0.5.23+bw.1")

        settings = Settings(prompts.load("tiny").first(4), Sampling(max_tokens=4))
        return MockBench(
            "tiny", engine, fingerprint.look(), ledger, build, lambda _: "", settings, (1, 2), tmp_path / "runs", 10,
            lambda *_: None, Silent(), together=True,
        )  # fmt: skip

    return made


@pytest.mark.parametrize(
    ("fault", "failure", "is_of_the_launch"),
    [("die", FailureClass.OTHER, True), ("500", FailureClass.MEMORY_SERVING, True), ("context", None, False)],
)
def test_a_choice_that_fails_is_a_result_of_its_own(
    server_bench: Callable[[str, str], ServerBench],
    ledger: Ledger,
    fault: str,
    failure: FailureClass | None,
    is_of_the_launch: bool,
) -> None:
    bench = server_bench("", fault)
    (tried,) = Tuning("s", Space((Setting("max-running-requests", (AS_IS, "4")),)), bench, ledger).run()
    entry = ledger.find(tried.entry)
    assert (entry.result, entry.study) == ("failed", "s")
    assert failure in (None, entry.failure)
    assert bool(entry.launch) == is_of_the_launch  # a prompt that does not fit says nothing about other prompts


@pytest.mark.parametrize(("fault", "code"), [("die", 78), ("500", 78), ("context", 72)])
def test_what_is_no_fault_of_a_choice_ends_the_search(
    server_bench: Callable[[str, str], ServerBench], ledger: Ledger, fault: str, code: int
) -> None:
    bench = server_bench(fault, "")
    choice = {"max-running-requests": "4"}
    with pytest.raises(BwError) as found:
        Tuning("s", Space((Setting("max-running-requests", (AS_IS, "4")),)), bench, ledger).run()
    assert found.value.exit_code == code
    assert not ledger.select(Query(study="s"))
    assert bench.refusal(choice) is None  # it has not failed


def launch(text: str) -> flags.Flags:
    return flags.parse(text.split())


CHAIN = launch(
    "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 4 --max-running-requests 16 --mem-fraction-static 0.9 --attention-backend triton"
)


def test_the_usual_space_leaves_out_what_is_there() -> None:
    cpu = {one.name: one.values for one in spaces.usual(CHAIN, has_gpus=False).settings}
    assert cpu == {"steps": (AS_IS, "1", "2", "5", OFF), "max-running-requests": (AS_IS, "8", "32")}
    gpu = {one.name: one.values for one in spaces.usual(CHAIN, has_gpus=True).settings}
    assert gpu["mem-fraction-static"] == (AS_IS, "0.86", "0.88", "0.92", "0.94")
    assert "triton" not in gpu["attention-backend"]
    assert "steps" not in {one.name for one in spaces.usual((), has_gpus=True).settings}
    tree = flags.merge(CHAIN, launch("--speculative-eagle-topk 4 --speculative-num-draft-tokens 8"))
    assert {one.name for one in spaces.usual(tree, has_gpus=False).settings} >= {"speculative-eagle-topk"}


def test_choices_become_flags() -> None:
    added, speculates = spaces.flags_of({"steps": "5", "max-running-requests": "4", "attention-backend": AS_IS}, CHAIN)
    assert speculates
    line = " ".join(flags.tokens(added))
    assert line == "--speculative-num-steps 5 --speculative-num-draft-tokens 6 --max-running-requests 4"
    added, speculates = spaces.flags_of({"steps": OFF, "speculative-eagle-topk": "2", "enable-x": "true"}, CHAIN)
    assert (flags.tokens(added), speculates) == (["--enable-x"], False)


@pytest.mark.parametrize(
    "names", [("steps=1", "steps=2"), ("tp=1", "tp-size=2"), ("steps=1", "speculative-num-draft-tokens=4")]
)
def test_two_settings_of_one_flag_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(TuneError, match="by more than one setting"):
        spaces.check(Space(tuple(map(spaces.parse, names))), ())


def test_the_draft_tokens_of_a_chain_follow_its_steps(tmp_path: Path) -> None:
    added, _ = spaces.flags_of({"speculative-num-steps": "5"}, CHAIN)
    assert flags.value(added, "speculative-num-draft-tokens") == "6"
    tree = flags.merge(CHAIN, launch("--speculative-eagle-topk 4 --speculative-num-draft-tokens 8"))
    added, _ = spaces.flags_of({"speculative-eagle-topk": "1"}, tree)
    assert flags.value(added, "speculative-num-draft-tokens") == "4"
    assert not flags.has(spaces.flags_of({"speculative-num-steps": "5"}, tree)[0], "speculative-num-draft-tokens")
    spec = lookup.read(written(tmp_path, winner(speculative_num_steps="5"))).on(Hardware(device="cpu")).spec
    assert spec
    assert (spec.steps, spec.draft_tokens) == (5, 6)


@pytest.mark.parametrize("text", ["", "a", "=1", "a=", "a=,", "--=3"])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(TuneError, match="no setting"):
        spaces.parse(text)


@pytest.mark.parametrize("text", ["steps=abc", "steps=1,0", "steps=-1", "steps=1.5", "steps=OFF", "steps=²"])
def test_draft_steps_that_are_none(text: str) -> None:
    with pytest.raises(TuneError, match="no number of draft steps"):
        spaces.parse(text)


def test_settings_as_they_are_typed() -> None:
    assert spaces.parse("--tp=1, 2,2").values == (AS_IS, "1", "2")
    assert spaces.parse("tp=1").name == "tp-size"
    with pytest.raises(TuneError, match="nothing to search"):
        spaces.check(Space(()), ())
    with pytest.raises(TuneError, match="no flag of this engine"):
        spaces.check(Space((spaces.parse("nonsense=1"),)), ("tp-size",))


def winner(**choice: str) -> Tried:
    fields = {name.replace("_", "-"): value for name, value in choice.items()}
    return Tried(fields, "faster", Score(1.32, 1.3, 1.34), "", "20261129-120000-abcdef")


def written(tmp_path: Path, found: Tried, *more: Tried) -> Path:
    file = tmp_path / "tuned.yaml"
    recipe = tuned.recipe(lookup.find("tiny"), found, [found, *more], run(), "cpu")
    file.write_text(tuned.text(recipe, "study"))
    return file


def test_the_recipe_carries_its_evidence_and_what_failed(tmp_path: Path) -> None:
    failed = Tried({"steps": "9"}, "failed", None, "ValueError: no", "x1")
    file = written(
        tmp_path,
        winner(steps="2", max_running_requests="8", mem_fraction_static="0.5", cuda_graph_max_bs_decode="4"),
        failed,
    )
    again = lookup.read(file)
    launched = again.on(Hardware(device="cpu"))
    assert launched.spec
    assert (launched.spec.steps, launched.spec.draft_tokens) == (2, 3)
    assert launched.args["max-running-requests"] == 8
    assert (launched.memory.fraction, launched.graphs.decode_max_bs) == (0.5, 4)
    assert again.on(Hardware(device="cuda")).spec.steps == 3  # type: ignore[union-attr]
    evidence = again.evidence[-1]
    assert evidence.numbers["ratio"] == 1.32
    assert evidence.numbers["tok_s_at_4"] > 0
    assert "20261129-120000-abcdef" in evidence.source
    assert "ValueError: no" in again.known_failures[-1].symptom
    assert "--study study" in file.read_text()


def test_a_tree_can_become_a_chain(tmp_path: Path) -> None:
    spec = {"algorithm": "EAGLE3", "steps": 3, "topk": 4, "draft_tokens": 8}
    tree = Recipe.model_validate({**lookup.find("tiny").model_dump(exclude_defaults=True), "spec": spec})
    found = winner(speculative_eagle_topk="1")
    launched = tuned.recipe(tree, found, [found], run(), "cpu").on(Hardware(device="cpu"))
    assert launched.spec
    assert (launched.spec.topk, launched.spec.steps, launched.spec.draft_tokens) == (1, 3, 4)


def test_a_recipe_without_speculation_can_win(tmp_path: Path) -> None:
    again = lookup.read(written(tmp_path, winner(steps=OFF)))
    assert again.spec is None
    assert again.draft is None
    assert "overrides" in yaml.safe_load(written(tmp_path, winner(steps=OFF)).read_text())
