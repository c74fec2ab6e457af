"""A round of 0 draft steps decodes plainly, and the draft is as good as before when drafting resumes.

Real, in the second half: the engine's scheduler, the bundled pair and its weights on a CPU. Stood in for: the policy,
by a written pattern of steps.
"""

from __future__ import annotations

import array
import contextlib
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.cpu_package import put_stand_in, start_scheduler

PAIR = Path(__file__).resolve().parents[3] / "sglang_bw" / "models" / "tiny_pair"
PROMPTS = (
    "At the end of the winter, Lena left the meadow with",
    "user: Can you say something about yourself?\nassistant: ",
    "def get_number(word):\n    try:\n        return int(word)\n    except ValueError:",
)
TOKENS = 64
ALWAYS = [3]


@pytest.mark.stock_failure(AssertionError, "^a round of 0 steps runs verify, draft-extend")
def test_a_round_of_0_steps_runs_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    put_stand_in(monkeypatch)
    from sglang.srt.speculative import eagle_worker_v2 as module

    for name in ("draft_tp_context", "speculative_moe_backend_context", "speculative_moe_a2a_backend_context"):
        monkeypatch.setattr(module, name, lambda *_: contextlib.nullcontext())
    ran: list[str] = []
    out = SimpleNamespace(
        new_seq_lens=torch.tensor([9]),
        next_token_ids=torch.tensor([5]),
        logits_output=SimpleNamespace(hidden_states=torch.zeros(1, 3)),
        next_draft_input=SimpleNamespace(),
    )

    def note(name: str, result: Any = None) -> Any:
        return lambda *_, **__: (ran.append(name), result)[1]

    draft_input = SimpleNamespace(is_verify_input=lambda: False, topk_p=None, topk_index=None, hidden_states=None)
    worker = SimpleNamespace(
        activate_step_by_batch=lambda _: None,
        speculative_num_steps=0,
        _build_trivial_verify_input=lambda _: SimpleNamespace(is_verify_input=lambda: True, kv_loc_plan=None),
        verify=note("verify", out),
        draft_worker=SimpleNamespace(parallel_layout=None, _draft_extend_for_decode=note("draft-extend")),
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(shared_read_done_event=None)),
        _plain_decode=SimpleNamespace(serves=lambda _: True, forward=note("decode", out)),
        _catch_up=SimpleNamespace(is_due=lambda *_: False, record=lambda *_: None),
    )
    worker._forward_without_draft = lambda *args: module.EAGLEWorkerV2._forward_without_draft(worker, *args)
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    batch = SimpleNamespace(
        forward_mode=mode, is_extend_in_batch=False, seq_lens=torch.tensor([8]), spec_info=draft_input
    )
    # Contexts of parallel groups that this process does not have are asked after the round only.
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    module.EAGLEWorkerV2.forward_batch_generation(worker, batch)
    assert ran == ["decode"], f"a round of 0 steps runs {', '.join(ran)}"


def test_the_lengths_are_published_before_the_target_runs() -> None:
    """They are known then; a schedule that waits for them would wait for the round."""
    from sglang.srt.speculative import plain_decode as module

    target = SimpleNamespace(
        model_runner=SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8)),
            attn_backend=None,
            decode_cuda_graph_runner=None,
        )
    )
    order: list[tuple[str, list[int]]] = []
    out = SimpleNamespace(
        next_token_ids=torch.tensor([7, 8]),
        logits_output=None,
        can_run_cuda_graph=False,
        routed_experts_output=None,
        indexer_topk_output=None,
    )

    def generate(**_: Any) -> Any:
        order.append(("target", []))
        return out

    target.forward_batch_generation = generate
    plain = module.PlainDecode(target, attn_backend=None, graph_runner=None)
    ranks = SimpleNamespace(world_size=2, broadcast=lambda tokens, src: order.append((f"from {src}", tokens.tolist())))
    for overlap, greedy in ((True, True), (False, False)):
        order.clear()
        proposals = {"topk_p": torch.ones(2, 1), "topk_index": torch.ones(2, 1), "hidden_states": torch.ones(2, 4)}
        batch = SimpleNamespace(
            spec_info=SimpleNamespace(bonus_tokens=torch.tensor([1, 2]), **proposals),
            seq_lens=torch.tensor([3, 5]),
            seq_lens_cpu=None,
            req_pool_indices=None,
            req_to_token_pool=target.model_runner.req_to_token_pool,
            device="cpu",
            enable_overlap=overlap,
            sampling_info=SimpleNamespace(is_all_greedy=greedy),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "assign_extend_cache_locs_uniform_func", lambda **_: None)
            patch.setattr(module.ForwardBatch, "init_new", lambda *_, **__: None)
            patch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_group=ranks))
            result = plain.forward(batch, lambda lens: order.append(("publish", lens.tolist())))
        # Ranks that sample may choose otherwise: all of them go on with what the first one chose.
        assert order == [("publish", [4, 6]), ("target", []), *([] if greedy else [("from 0", [7, 8])])]
        assert result.new_seq_lens.tolist() == [4, 6]
        assert result.accept_lens.tolist() == [1, 1]
        # The relay of the overlap scheduler keeps what is not overwritten.
        assert (result.next_draft_input.topk_p is None) is overlap


def test_the_relay_keeps_proposals_that_a_plain_round_leaves_out() -> None:
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import spec_utils
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    pool = SimpleNamespace(req_to_token=torch.zeros(4, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec_utils, "spec_need_hidden_states", lambda *_: True)
        relay = overlap_utils.FutureMap(torch.device("cpu"), SpeculativeAlgorithm.EAGLE3, pool)
        rows = torch.tensor([1, 3])
        full = overlap_utils.RelayPayload(
            torch.tensor([5, 6]), torch.ones(2, 1), torch.tensor([[8], [9]]), torch.full((2, 4), 2.0)
        )
        relay.stash(rows, full)
        relay.stash(rows, overlap_utils.RelayPayload(torch.tensor([15, 16])))
    assert relay.output_tokens_buf[rows].tolist() == [15, 16]
    assert relay.topk_index_buf[rows].tolist() == [[8], [9]]
    assert relay.hidden_states_buf[rows].tolist() == [[2.0] * 4] * 2


class Pattern:
    """A policy that follows a list of step counts and remembers the rounds."""

    candidate_steps = (0, 1, 3)

    def __init__(self) -> None:
        self.steps = ALWAYS
        self.launched = 0
        self.rounds: list[tuple[int, list[int]]] = []

    def begin(self, steps: list[int]) -> None:
        self.steps, self.launched, self.rounds = steps, 0, []

    def get_steps_for_batch(self, batch: int) -> int:
        self.launched += 1
        return self.steps[(self.launched - 1) % len(self.steps)]

    def on_round(self, done: Any) -> None:
        self.rounds.append((done.num_steps, list(done.num_correct_drafts_per_req)))

    def resumed(self) -> list[int]:
        """Accepted drafts in the first round with 3 steps after each stay at 0."""
        found: list[int] = []
        for (before, _), (steps, accepted) in zip(self.rounds, self.rounds[1:], strict=False):
            if before == 0 and steps == 3:
                found += accepted
        return found

    def accepted(self) -> list[int]:
        return [n for steps, accepted in self.rounds if steps == 3 for n in accepted]


@pytest.fixture(scope="module")
def scheduler() -> Any:
    found = start_scheduler(
        model_path=str(PAIR / "target"),
        speculative_draft_model_path=str(PAIR / "draft"),
        speculative_algorithm="EAGLE3",
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        speculative_adaptive=True,
        speculative_adaptive_policy="goodput",
        device="cpu",
        dtype="float32",
        max_total_tokens=8192,
        max_running_requests=16,
        mem_fraction_static=0.3,
        disable_radix_cache=True,
    )
    found.goodput = found.draft_worker.adaptive_controller.params
    return found


def serve(scheduler: Any, pattern: Pattern, steps: list[int], late: int = 0) -> list[list[int]]:
    """Generate for all prompts, each ``late`` rounds after the one before, and return their tokens."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    pattern.begin(steps)
    requests = []
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
        sampling.normalize(scheduler.tokenizer)
        scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"{steps}-{late}-{number}",
                input_text=prompt,
                input_ids=array.array("q", scheduler.tokenizer.encode(prompt)),
                input_embeds=None,
                token_type_ids=None,
                mm_inputs=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )
        requests.append(scheduler.waiting_queue[-1])
        for _ in range(late):
            turn(scheduler)
    while not all(request.finished() for request in requests):
        turn(scheduler)
    turn(scheduler)
    return [list(request.output_ids)[:TOKENS] for request in requests]


def turn(scheduler: Any) -> None:
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch = plan.running_batch
    if plan.batch_to_run:
        scheduler.process_batch_result(plan.batch_to_run, scheduler.run_batch(plan.batch_to_run))
    scheduler.last_batch = plan.batch_to_run


@pytest.fixture(scope="module")
def pattern(scheduler: Any) -> Pattern:
    scheduler.draft_worker.adaptive_controller.params = Pattern()
    return scheduler.draft_worker.adaptive_controller.params


@pytest.fixture(scope="module")
def reference(scheduler: Any, pattern: Pattern) -> tuple[list[list[int]], float]:
    tokens = serve(scheduler, pattern, ALWAYS)
    return tokens, statistics.fmean(pattern.accepted())


@pytest.mark.parametrize(
    ("steps", "late"),
    [
        pytest.param([0] * 5 + [3] * 4, 0, id="fewer than the width"),
        pytest.param([0] * 16 + [3] * 4, 0, id="exactly the width"),
        pytest.param([0] * 37 + [3] * 4, 7, id="more than twice the width, one after another"),
        pytest.param([1, 0, 0, 3], 7, id="by way of 1 step, one after another"),
    ],
)
def test_the_draft_resumes_as_good_as_before(
    scheduler: Any, pattern: Pattern, reference: tuple[list[list[int]], float], steps: list[int], late: int
) -> None:
    tokens, accepted = reference
    assert serve(scheduler, pattern, steps, late) == tokens
    assert accepted > 2
    assert statistics.fmean(pattern.resumed()) > accepted - 0.5


def test_plain_rounds_alone_give_the_same_tokens(
    scheduler: Any, pattern: Pattern, reference: tuple[list[list[int]], float]
) -> None:
    assert serve(scheduler, pattern, [0]) == reference[0]
    assert {steps for steps, _ in pattern.rounds} == {0}


def test_a_catch_up_without_proposals_ends_with_the_keys_and_values(
    scheduler: Any, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ones as of a whole forward; what follows them in the model does not run."""
    catch_up = scheduler.draft_worker._catch_up
    run, kv_only = catch_up.run, catch_up.kv_only
    pool, (layer,) = catch_up.runner.token_to_kv_pool, catch_up.runner.model.model.layers
    followed: list[str] = []
    hook = layer.mlp.register_forward_hook(lambda *_: followed.append("mlp"))
    compared: list[int] = []

    def both(batch: Any, propose: bool) -> None:
        pending = catch_up.pending.clone()
        followed.clear()
        run(batch, propose)
        if propose:
            assert followed
            return
        assert not followed
        stored = [pool.k_buffer[0].clone(), pool.v_buffer[0].clone()]
        catch_up.pending.copy_(pending)
        monkeypatch.setattr(catch_up, "kv_only", None)
        run(batch, propose)
        monkeypatch.setattr(catch_up, "kv_only", kv_only)
        assert followed
        for one, other in zip(stored, (pool.k_buffer[0], pool.v_buffer[0]), strict=True):
            torch.testing.assert_close(one[1:], other[1:])  # slot 0 is nobody's
        compared.append(len(pending))

    monkeypatch.setattr(catch_up, "run", both)
    try:
        serve(scheduler, pattern, [0] * 40 + [3] * 2)
    finally:
        hook.remove()
    assert len(compared) >= 2
    assert pattern.resumed()


@pytest.mark.parametrize("change", ["two layers", "scaled", "another pool", "shared contexts", "offloaded", None])
def test_drafts_whose_keys_and_values_need_more(monkeypatch: pytest.MonkeyPatch, change: str | None) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MHATokenToKVPoolFP4
    from sglang.srt.speculative import kv_only_forward as module

    ranks, offload = 2 if change == "shared contexts" else 1, 8.0 if change == "offloaded" else 0.0
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=ranks))
    monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(offload=SimpleNamespace(cpu_offload_gb=offload)))
    layers = [RadixAttention(1, 8, 1.0, 1, layer_id=n) for n in range(2 if change == "two layers" else 1)]
    if change == "scaled":
        layers[0].k_scale = 2.0
    pool = MHATokenToKVPoolFP4 if change == "another pool" else MHATokenToKVPool
    model = torch.nn.ModuleList(layers)
    runner = SimpleNamespace(model=model, token_to_kv_pool=object.__new__(pool), req_to_token_pool=None)
    assert module.KVOnlyForward.serves(runner) is (change is None)
    if change is None:
        model.forward = lambda *_: None
        batch = SimpleNamespace(input_ids=None, positions=None, moe_num_token_non_padded=None)
        with pytest.raises(RuntimeError, match="did not run"):
            module.KVOnlyForward(runner).run(batch)


def test_a_draft_that_turns_useless_and_good_again(
    scheduler: Any, reference: tuple[list[list[int]], float], tmp_path: Path
) -> None:
    """The policy itself, the draft exchanged by the engine: off while it is useless, back when it is good again."""
    tokens, accepted = reference
    controller = scheduler.draft_worker.adaptive_controller
    watched = Watched(scheduler.goodput)
    useless = scrambled(PAIR / "draft", tmp_path / "draft")
    before, controller.params = controller.params, watched
    try:
        steady(scheduler, watched, tokens, lambda steps: steps > 0)
        assert watched.share() > accepted / 3 - 0.15
        update_draft(scheduler, useless)
        steady(scheduler, watched, tokens, lambda steps: steps == 0)
        assert watched.share() < 0.2
        update_draft(scheduler, PAIR / "draft")
        steady(scheduler, watched, tokens, lambda steps: steps > 0)
        assert watched.share() > accepted / 3 - 0.15
    finally:
        update_draft(scheduler, PAIR / "draft")
        controller.params = before


class Watched:
    """The engine's policy, with its rounds remembered."""

    def __init__(self, params: Any) -> None:
        self.params = params
        self.rounds: list[tuple[int, list[int]]] = []
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.params, name)

    def begin(self, _steps: list[int]) -> None:
        """Nothing is prescribed."""

    def on_round(self, done: Any) -> None:
        self.rounds.append((done.num_steps, list(done.num_correct_drafts_per_req)))
        self.params.on_round(done)

    def share(self) -> float:
        """What was accepted of the drafts since the last time, however many steps there were."""
        drafted = [(steps, found) for steps, found in self.rounds[self.asked :] if steps]
        self.asked = len(self.rounds)
        return statistics.fmean(n / steps for steps, found in drafted for n in found)


def steady(scheduler: Any, watched: Watched, tokens: list[list[int]], wanted: Any, most: int = 60) -> None:
    """Serve until the policy has stayed with what is ``wanted`` for a whole run of the prompts."""
    for number in range(most):
        first = len(watched.rounds)
        assert serve(scheduler, watched, [number, first]) == tokens  # type: ignore[arg-type]
        tier = watched.snapshot()["steps"]
        rounds = [steps for steps, _ in watched.rounds[first:]]
        if wanted(tier) and sum(map(wanted, rounds)) > 0.7 * len(rounds):
            return
    raise AssertionError(f"after {len(watched.rounds)} rounds: {watched.snapshot()}")


def update_draft(scheduler: Any, folder: Path) -> None:
    for _, runner in scheduler.draft_worker.weight_update_runners():
        ok, message = runner.weight_updater.update_weights_from_disk(str(folder), "auto")
        assert ok, message


def scrambled(source: Path, target: Path) -> Path:
    """Copy a draft with the rows of its layers' weights in another order."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
            continue
        dice = torch.Generator().manual_seed(1)
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() == 2 and weight.is_floating_point():
                weights[name] = weight[torch.randperm(len(weight), generator=dice)].contiguous()
        save_file(weights, target / file.name)
    return target
