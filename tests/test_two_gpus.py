"""The script for two GPUs, as far as it needs none: its processes, its verdicts, its models, its promises."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.host import probes
from tests.conftest import CHECKOUT

sys.path.append(str(CHECKOUT / "scripts"))

import two_gpus
from ranks import allreduce, arms, decisions, faults, greedy, moe, pair, policy, tp2
from ranks.bench import Bench, environment, last_words, part_file, ranks, read_part
from ranks.control import Control, Group, rows
from record.servers import Record

# --- processes ---------------------------------------------------------------------------------------------------

_PART = """
import json, sys, time
from pathlib import Path
scratch, *parts = sys.argv[1:]
def put(part, **record):
    new = Path(scratch) / (part + ".new")
    new.write_text(json.dumps({"began": time.time(), "seconds": 0.0, **record}))
    new.replace(Path(scratch) / (part + ".json"))
for part in parts:
    put(part, state="running", found=1)
    if part.startswith("hangs"):
        time.sleep(600)
    if part.startswith("dies"):
        raise MemoryError("no room for " + part)
    put(part, state="done")
"""


def _control(tmp_path: Path, told: dict[str, Record], limits: dict[str, float], seconds: float = 60) -> Control:
    def command(parts: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", _PART, str(tmp_path), *parts]

    return Control(tmp_path, command, limits, time.time() + seconds, told.__setitem__)


def test_a_part_that_hangs_or_dies_costs_no_other(tmp_path: Path) -> None:
    told: dict[str, Record] = {}
    limits = dict.fromkeys(["works", "hangs", "after", "dies", "last", "beside"], 30.0) | {"hangs": 0.5}
    groups = [Group(["works", "hangs", "after"]), Group(["dies", "last"], alone=False), Group(["beside"], alone=False)]
    _control(tmp_path, told, limits).run(groups)
    assert {part: record["state"] for part, record in told.items()} == {
        "works": "done", "hangs": "failed", "after": "done", "dies": "failed", "last": "done", "beside": "done",
    }  # fmt: skip
    assert told["hangs"]["reason"] == "it took longer than 0 s"
    assert told["hangs"]["found"] == 1  # what it had written is kept
    assert "MemoryError: no room for dies" in told["dies"]["reason"]
    assert all(group.process is None for group in groups)


def test_nothing_begins_when_the_time_is_up(tmp_path: Path) -> None:
    told: dict[str, Record] = {}
    _control(tmp_path, told, {"works": 30.0}, seconds=-1).run([Group(["works"])])
    assert told["works"]["reason"] == "the time for all parts was up before it began"
    assert read_part(tmp_path, "works")["state"] == "failed"


def test_what_measures_time_runs_alone() -> None:
    a, b, c, d = Group(["a"]), Group(["b"], alone=False), Group(["c"], alone=False), Group(["d"])
    assert rows([a, b, c, d]) == [[a], [b, c], [d]]
    assert rows([b, a, c]) == [[b], [a], [c]]


def test_ranks_answer_or_are_named_and_killed(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text("import json, sys\nprint('noise')\nprint(json.dumps({'rank': int(sys.argv[1])}))\n")
    assert ranks("ok", program, tmp_path, [], tmp_path, 30) == [{"rank": 0}, {"rank": 1}]
    program.write_text("import sys, time\nif sys.argv[1] == '1':\n    raise ValueError('lost')\ntime.sleep(600)\n")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 0 hung: .*rank 1 ended with 1: ValueError: lost"):
        ranks("bad", program, tmp_path, [], tmp_path, 3)
    assert time.monotonic() - began < 20


def test_the_script_says_what_it_would_do(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    words = ["--stock", str(tmp_path), "--patched", str(tmp_path), "--output", str(tmp_path / "out.json")]
    script = [sys.executable, str(CHECKOUT / "scripts" / "two_gpus.py"), *words]
    done = subprocess.run([*script, "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tp2, policy" in done.stdout
    wrong = subprocess.run([*script, "--limits", "nothing=3"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "no part is called 'nothing'" in wrong.stderr


def test_the_last_error_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a\nValueError: first\nb\ntorch.OutOfMemoryError: second\n[12:00] kill_process_tree called\n")
    assert last_words(log) == "torch.OutOfMemoryError: second"
    log.write_text("IndexError: cause\nRuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]\n")
    assert last_words(log) == "IndexError: cause"
    log.write_text("only\nwords\n")
    assert last_words(log) == "only\nwords"


# --- multicast ---------------------------------------------------------------------------------------------------


def test_nothing_that_needs_multicast_is_asked_for(tmp_path: Path) -> None:
    assert not {"nccl-symm-mem", "torch-symm-mem"} & set(allreduce.WAYS)
    assert environment("cuda")["NCCL_NVLS_ENABLE"] == "0"
    assert environment("cuda")["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    words = allreduce.command(7168, tmp_path, "cuda", tmp_path, "1,4", 10, list(allreduce.WAYS))
    assert words.count("--backend") == len(allreduce.WAYS)
    assert all(way in words for way in allreduce.WAYS)


# --- decisions ---------------------------------------------------------------------------------------------------


def _lines(rounds: int) -> list[str]:
    dice = random.Random(1)
    found = []
    for number in range(rounds):
        steps = 3 if number < rounds // 2 else 0
        found += [f"launch,4,{steps}", f"round,4,{steps},{dice.getrandbits(32)}"]
    return found


def test_ranks_that_decide_the_same(tmp_path: Path) -> None:
    log = decisions.Log.of(tmp_path / "decisions")
    for rank in (0, 1):
        (log.folder / f"rank{rank}").write_text("\n".join(_lines(50)) + "\nlaun")
    found = decisions.compare(log.new(), 2)
    assert found["same"]
    assert (found["launches"], found["rounds"], found["switches"]) == (50, 50, 1)
    assert found["steps"] == {"3": 25, "0": 25}
    with (log.folder / "rank0").open("a") as file:  # the half line is read when it is whole
        file.write("ch,8,1\n")
    assert log.new()["rank0"] == ["launch,8,1"]


@pytest.mark.parametrize("change", [lambda lines: lines.__setitem__(41, "launch,4,1"), lambda lines: lines.pop()])
def test_ranks_that_do_not(change: Callable[[list[str]], object]) -> None:
    one, two = _lines(50), _lines(50)
    change(two)
    found = decisions.compare({"rank0": one, "rank1": two}, 2)
    assert not found["same"]
    assert found["first_difference"]["line"] in (41, 99)


def test_a_rank_without_a_log_is_no_agreement() -> None:
    assert not decisions.compare({"rank0": _lines(5)}, 2)["same"]
    assert not decisions.compare({}, 2)["same"]
    assert not decisions.compare({"rank0": [], "rank1": []}, 2)["same"]


_HOOKED = """
import json, sys, time, types
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import os
os.environ["BW_CONTROL"], os.environ["BW_DECISIONS"] = sys.argv[2], sys.argv[3]
sys.modules.pop("sitecustomize", None)  # the environment's own, if it has one
import sitecustomize
import torch
class GoodputParams:
    def get_steps_for_batch(self, batch): return 3
    def on_round(self, done): return None
utils = types.ModuleType("sglang.srt.speculative.spec_utils")
def sample(mean, method, most):
    return int(torch.randint(0, 1000, (1,)))
utils.sample_simulated_acc_len, utils.SIMULATE_ACC_LEN = sample, 3.0
policy = types.ModuleType("sglang.srt.speculative.goodput_params")
policy.GoodputParams = GoodputParams
sys.modules[policy.__name__], sys.modules[utils.__name__] = policy, utils
control = Path(sys.argv[2])
def put(**wanted):
    control.write_text(json.dumps(wanted) + "\\n")
    deadline = time.monotonic() + 20
    while utils.SIMULATE_ACC_LEN != wanted["accept_length"] and time.monotonic() < deadline:
        time.sleep(0.01)
put(accept_length=1.5, steps=-1, slow_ms=0, slow_rank=0)
torch.manual_seed(int(sys.argv[4]))
drawn = [utils.sample_simulated_acc_len(1.5, "", 4) for _ in range(20) if torch.rand(1) < 2]
params = GoodputParams()
begin = time.perf_counter(); params.get_steps_for_batch(4); fast = time.perf_counter() - begin
put(accept_length=2.5, steps=1, slow_ms=50, slow_rank=0)
begin = time.perf_counter(); steps = params.get_steps_for_batch(4); slow = time.perf_counter() - begin
done = types.SimpleNamespace(num_correct_drafts_per_req=[1, 2], num_steps=1, batch_size=2, launch_gap_s=None)
params.on_round(done)
put(accept_length=3.5, steps=[0, 0, 3], slow_ms=0, slow_rank=0)
pattern = [params.get_steps_for_batch(batch) for batch in (4, 0, 4, 4, 4)]
print(json.dumps({"pattern": pattern, "drawn": drawn, "fast": fast, "slow": slow, "steps": steps}))
"""


@pytest.mark.engine
@pytest.mark.alone
def test_what_is_injected_draws_alike_sleeps_and_writes_decisions(tmp_path: Path) -> None:
    inject = str(CHECKOUT / "scripts" / "record" / "inject")
    started = []
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        control = tmp_path / f"{seed}.control"
        control.write_text("")
        command = [sys.executable, "-c", _HOOKED, inject, str(control), str(tmp_path / seed), seed]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    found = [json.loads(out) for out, _ in said]
    for seed in ("1", "2"):
        lines = (tmp_path / seed / "rank0").read_text().splitlines()
        assert lines[:2] == ["launch,4,3", "launch,4,1"]
        assert lines[2].startswith("round,2,1,")
    assert found[0]["drawn"] == found[1]["drawn"]  # whatever else drew from the engine's numbers
    assert len(set(found[0]["drawn"])) > 5
    assert all(one["pattern"] == [0, 3, 0, 3, 0] for one in found)  # without a request nothing is launched
    assert all(one["slow"] >= 0.05 > one["fast"] and one["steps"] == 1 for one in found)


# --- verdicts ----------------------------------------------------------------------------------------------------


def _answer(tokens: list[int], scores: list[list[tuple[float, int, None]]] | None = None) -> dict[str, Any]:
    meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 2, "output_top_logprobs": scores}
    return {"output_ids": tokens, "meta_info": meta}


def test_a_first_difference_is_a_tie_or_a_loss() -> None:
    # ln(1024) is 6.93: logits of 4.93 and, one last place of bf16 (2^-5) below, 4.90.
    near = [[(-2.0, 5, None), (-2.0 - 2**-5, 6, None)]]
    far = [[(-2.0, 5, None), (-2.5, 6, None)]]
    known = [_answer([5], near), _answer([5], far), _answer([5], far)]
    found = greedy.compare(known, [_answer([6]), _answer([5]), _answer([5])], 1024)
    assert (found["same"], found["ties"], found["apart"], found["lossless"]) == (2, 1, 0, True)
    assert found["first_differences"][0]["ulp"] == 1.0
    assert found["accept_length"] == 2.0
    lost = greedy.compare(known, [_answer([5]), _answer([6]), _answer([7])], 1024)
    assert (lost["ties"], lost["apart"], lost["lossless"]) == (0, 2, False)
    assert lost["first_differences"][1]["ulp"] is None  # not even among the best
    wide = greedy.compare(known, [_answer([5]), _answer([6]), _answer([7])], 1024, near=16)
    assert (wide["ties"], wide["apart"], wide["farthest_ulp"]) == (1, 1, 16.0)


def test_experts_may_round_as_much_as_without_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several requests at once change in the plain server's answers is the least that a draft may change."""
    scores = [[(-2.0, 5, None), (-2.0 - 3 * 2**-5, 6, None), (-2.0 - 4 * 2**-5, 7, None)]]
    plain, draft = (moe.Arm(name, "patched", "int4", draft=name == "draft") for name in ("plain", "draft"))
    bench = Bench(argparse.Namespace(prompts=1, answer=1), tmp_path)
    bench.servers = {"plain": "plain", "draft": "draft"}  # type: ignore[dict-item]
    said = {"plain": [6], "draft": [6]}
    monkeypatch.setattr(greedy, "reference", lambda *_: [_answer([5], scores)])
    monkeypatch.setattr(greedy, "ask", lambda server, *_: [_answer(said[server])])
    known: moe.Known = {}
    assert moe._answers(bench, draft, known)["reason"]
    assert moe._answers(bench, plain, known)["lossless"]
    assert moe._answers(bench, draft, known)["lossless"]
    said["draft"] = [7]
    assert not moe._answers(bench, draft, known)["lossless"]
    said["plain"] = [5]
    assert moe._answers(bench, plain, known)["lossless"]
    said["draft"] = [6]
    assert not moe._answers(bench, draft, known)["lossless"]
    assert moe.environment(bench, draft)["SGLANG_SIMULATE_ACC_LEN"] == "-1"  # or nothing of this would be verified


def test_a_ratio_needs_a_narrow_interval() -> None:
    dice = random.Random(0)
    same = [[100 + dice.gauss(0, 0.5), 100 + dice.gauss(0, 0.5)] for _ in range(16)]
    assert tp2.judge(same)["verdict"] == "passes"
    assert tp2.judge([[stock, patched * 0.9] for stock, patched in same])["verdict"] == "fails"
    assert tp2.judge([[100 + dice.gauss(0, 20), 100 + dice.gauss(0, 20)] for _ in range(16)])["verdict"] == "undecided"


def test_a_sum_is_right_when_every_rank_has_it() -> None:
    right = {"equal": True, "found": [3.0, 3.0], "nccl": [3.0, 3.0]}
    wrong = {"equal": False, "found": [1.0, 1.0], "nccl": [3.0, 3.0]}
    both = [{"cases": {"bf16 in place": right}, "buffer": 1}, {"cases": {"bf16 in place": right}, "buffer": 1}]
    assert faults.judge(both)["right"]
    both[1] = {"cases": {"bf16 in place": wrong}, "buffer": 1}
    assert faults.judge(both)["wrong"] == ["bf16 in place"]
    assert not faults.judge([{"cases": {"bf16 in place": {"error": "size"}}}] * 2)["right"]


def test_real_weights_must_agree_but_for_ties() -> None:
    assert pair.lossless({"first_differences": []})
    assert pair.lossless({"first_differences": [{"engine_ulp": -1.0, "fp32_ulp": 5.0}]})
    assert not pair.lossless({"first_differences": [{"fp32_ulp": 1.0}, {"engine_ulp": 3.0, "fp32_ulp": 0.0}]})
    assert next(iter(pair.arms("cuda"))) == "plain"


def test_rests_of_the_draft_are_told_apart(tmp_path: Path) -> None:
    """First rounds after rounds of 0 steps by their number, a change of the batch apart; then the others."""
    rounds = [
        (3, 1, 2.0),
        (3, 1, 3.0),
        (0, 1, 0.0),
        (0, 1, 0.0),
        (3, 1, 1.0),
        (3, 1, 2.0),
        (3, 2, 0.5),
        (0, 2, 0.0),
        (3, 2, 1.5),
    ]
    file = tmp_path / "rounds"
    file.write_text("".join(f"1.0,{steps},{batch},{mean},None\n" for steps, batch, mean in rounds))
    assert pair.rested(file) == {
        "rounds": 9,
        "after_a_rest": 2.25,
        "drafting": 3.5,
        "by_rest": {1: [1, 2.5], 2: [1, 2.0]},
    }
    assert pair.STEPS.count(0) > 16 + pair.STEPS.count(3)


def test_lines_of_records_that_are_not_whole() -> None:
    for part in (allreduce, faults, moe, pair, policy, tp2):
        assert part.line({}) == ""
    assert "NOT the same" in policy.line({"agreement": {"long": decisions.compare({"rank0": ["launch,1,1"]}, 2)}})


# --- servers and models ------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "sglang").mkdir()
    words = ["--stock", str(tmp_path), "--patched", str(tmp_path), "--output", str(tmp_path / "out.json")]
    options: argparse.Namespace = two_gpus.parse([*words, "--shape", "small"])
    return Bench(options, tmp_path)


def test_what_a_probe_measured_is_kept_when_it_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.options.hidden, bench.options.device = [4096], "cpu"
    bench.begin("allreduce")

    def ended(words: list[str], **_: Any) -> None:
        rest = dict.fromkeys(("failures", "versions", "hidden", "gpus", "taken"))
        found: Record = {**rest, "latencies": [{"backend": "nccl"}], "complete": False}
        probes.store(Path(words[words.index("--out") + 1]), found)
        raise SystemExit(143)

    monkeypatch.setattr(subprocess, "run", ended)
    with pytest.raises(SystemExit):
        allreduce.run(bench)
    kept = read_part(bench.scratch, "allreduce")["sizes"]["4096"]
    assert (kept["latencies"], kept["complete"], kept["exit_code"]) == ([{"backend": "nccl"}], False, None)


def test_ranks_that_decide_otherwise_in_the_grid_fail_the_part(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.options.seconds = bench.options.slow_seconds = 0.0
    bench.begin("policy")
    differs = decisions.compare({"rank0": _lines(5), "rank1": _lines(6)}, 2)
    monkeypatch.setattr(policy, "measure", lambda bench, _: bench.record["agreement"].update(grid=differs))
    with pytest.raises(RuntimeError, match="did not decide the same: grid"):
        policy.run(bench)


def test_arms_differ_in_nothing_else(bench: Bench) -> None:
    assert arms.flags(bench, "stock") == arms.flags(bench, "patched")
    off, goodput = arms.flags(bench, "off"), arms.flags(bench, "goodput")
    assert not any(name.startswith("speculative") for name in off)
    assert off.items() <= arms.flags(bench, "patched").items()
    assert goodput["speculative-adaptive-policy"] == "goodput"
    assert {arms.flags(bench, name)["tp-size"] for name in ("off", "goodput")} == {2}


def test_plain_servers_of_each_model_come_first() -> None:
    found = moe.arms(["none", "deepep"], 40)
    assert [arm.name for arm in found[:3]] == ["patched bf16 plain", "patched int4 plain", "patched glm plain"]
    assert [arm.draft for arm in found] == [False] * 4 + [True] * (len(found) - 4)
    by_name = {arm.name: arm.flags for arm in found}
    assert by_name["stock int4 eplb"] == by_name["patched int4 eplb"] != by_name["patched int4 none"]
    assert by_name["patched bf16 deepep"] == by_name["patched bf16 deepep plain"] == moe.DEEPEP
    assert "patched int4 deepep" not in by_name
    assert "ep-num-redundant-experts" not in by_name["stock glm eplb"]


class _Fake:
    """A server that answers with ``tokens``."""

    def __init__(self, tokens: list[int], log: Path) -> None:
        self.tokens, self.log, self.ready_s = tokens, log, 1.0
        self.process = argparse.Namespace(poll=lambda: None)

    def is_ready(self) -> bool:
        return True

    def generate(self, count: int, **_: Any) -> dict[str, Any]:
        return _answer(self.tokens[:count], [[(-1.0, token, None), (-9.0, 0, None)] for token in self.tokens])


def test_other_tokens_a_missing_rebalance_and_no_reference_are_told_apart(bench: Bench) -> None:
    log = bench.scratch / "log"
    log.write_text("[00:00 TP0 EP0] [EPLBManager] rebalance end\n[00:00 TP1 EP1] [EPLBManager] rebalance end\n")
    quiet = bench.scratch / "quiet"
    quiet.write_text("")
    tokens = {"plain": [5, 6], "eplb": [5, 6], "other eplb": [5, 7], "quiet eplb": [5, 6]}
    bench.options.answer = 2
    known: moe.Known = {}
    early = moe.Arm("eplb", "patched", "bf16", draft=True)
    bench.servers = {name: _Fake(own, quiet if "quiet" in name else log) for name, own in tokens.items()}  # type: ignore[misc]
    assert "plain server" in moe._arm(bench, early, known)["reason"]
    rows = {name: moe._arm(bench, moe.Arm(name, "patched", "bf16", draft=name != "plain"), known) for name in tokens}
    assert [row["lossless"] for row in rows.values()] == [True, True, False, False]
    assert rows["eplb"]["rebalances"] == 1
    assert rows["quiet eplb"]["reason"] == "no rebalance happened"
    assert rows["other eplb"]["again"]["apart"] == bench.options.prompts


def test_a_slow_start_holds_up_its_own_model_only(bench: Bench) -> None:
    quiet = bench.scratch / "quiet"
    quiet.write_text("")
    arms = [moe.Arm(f"{model}{draft}", "patched", model, draft=bool(draft)) for draft in ("", " d") for model in "ab"]
    bench.servers = {arm.name: _Fake([5], quiet) for arm in arms}  # type: ignore[misc]
    bench.servers["a"].is_ready = lambda: False  # type: ignore[method-assign]
    now = time.monotonic()
    order: list[str] = []
    while (arm := moe._next(bench, arms, now + 60)) is not None:
        arms.remove(arm)
        order.append(arm.name)
    assert order == ["b", "b d"]
    assert [arm.name for arm in arms] == ["a", "a d"]
    assert moe._next(bench, arms, now - 1) is arms[0], "the limit is over: it is asked, and says why not"


@pytest.mark.engine
def test_rounding_does_not_change_the_experts_of_a_token() -> None:
    import torch
    from ranks import kimi

    tensors = dict(kimi.target(kimi.Weights(1), int4=False))
    embedding = tensors["model.embed_tokens.weight"].float()
    rest = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0)) * 3
    rest[:, : kimi.EXPERTS] = 0
    hidden = embedding + rest  # as after layers that write everywhere else
    hidden = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()
    gate = tensors["model.layers.6.mlp.gate.weight"].float()
    scores = torch.sigmoid(hidden @ gate.T).sort(-1, descending=True)
    assert torch.equal(scores.indices[:, :4], embedding[:, : kimi.EXPERTS].sort(-1, descending=True).indices[:, :4])
    gaps = (scores.values[:, :-1] - scores.values[:, 1:])[:, :4]
    assert gaps.min() > 0.03
    use = torch.bincount(scores.indices[:, :4].flatten(), minlength=kimi.EXPERTS)
    assert use[:4].sum() > 3 * use[-4:].sum(), "a rebalance has something to do"
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not tensor[: kimi.EXPERTS].any(), name


def test_a_backend_that_is_not_there_says_so() -> None:
    assert moe.absent("") == ""
    assert moe.absent("json") == ""
    assert moe.absent("no_such_backend.ep") == "not installed"


def test_a_record_is_whole_at_any_time(bench: Bench) -> None:
    bench.begin("tp2")
    bench.record["found"] = 1
    bench.keep()
    assert read_part(bench.scratch, "tp2")["found"] == 1
    assert json.loads(part_file(bench.scratch, "tp2").read_text())["state"] == "running"


@pytest.mark.engine
def test_four_bits_are_what_the_engine_unpacks(tmp_path: Path) -> None:
    import torch
    from compressed_tensors.compressors import unpack_from_int32
    from ranks import kimi

    tensors = dict(kimi.Weights(1).packed("w", 64, 128))
    values = unpack_from_int32(tensors["w.weight_packed"], 4, torch.Size(tensors["w.weight_shape"].tolist()))
    assert (values.min(), values.max()) == (-8, 7)
    full = values.float() * tensors["w.weight_scale"].float().repeat_interleave(kimi.GROUP, 1)
    assert full.std() == pytest.approx(128**-0.5, rel=0.1)
    names = {name for name, _ in kimi.target(kimi.Weights(1), int4=True)}
    assert f"model.layers.{kimi.LAYERS - 1}.mlp.experts.{kimi.EXPERTS - 1}.down_proj.weight_packed" in names
    assert "model.layers.0.mlp.down_proj.weight" in names


@pytest.mark.engine
def test_checkpoints_are_those_of_their_classes(tmp_path: Path) -> None:
    from ranks import glm, kimi
    from safetensors import safe_open

    for folder, architecture in (
        (kimi.write(tmp_path / "kimi", int4=True), "KimiK25ForConditionalGeneration"),
        (glm.write(tmp_path / "glm"), "Glm4MoeForCausalLM"),
        (kimi.write_draft(tmp_path / "draft"), "LlamaForCausalLMEagle3"),
    ):
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [architecture]
        text = config.get("text_config", config)
        with safe_open(folder / "model.safetensors", "pt") as tensors:
            heads = [name for name in tensors.keys() if name.endswith("lm_head.weight")]  # noqa: SIM118
            assert tensors.get_slice(heads[0]).get_shape() == [text["vocab_size"], text["hidden_size"]]
