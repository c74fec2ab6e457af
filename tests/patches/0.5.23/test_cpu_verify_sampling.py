"""Sampling in EAGLE verify on a CPU: exact for chain and tree, and greedy requests stay greedy.

``eagle_sample`` runs on a made-up target whose distribution at a node depends on the node's path. What it emits over
many identical requests is compared with that target by chi-square tests, seeds fixed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import scipy.stats
import torch

from tests.patches.cpu_package import eagle_arguments, put_stand_in, resolve

VOCAB = 5
REQUESTS = 8000
SIGNIFICANCE = 1e-3

# First children, next siblings and tokens of the drafted nodes; -1 for none. Node 0 is the last verified token.
CHAIN = {"next_token": [1, 2, -1], "next_sibling": [-1, -1, -1], "tokens": [0, 3, 1], "depth": 3}
TREE = {
    "next_token": [1, 3, 5, -1, -1, -1],
    "next_sibling": [-1, 2, -1, 4, -1, -1],
    "tokens": [0, 3, 1, 4, 1, 2],
    "depth": 3,
}
SHAPES = [pytest.param(CHAIN, id="chain"), pytest.param(TREE, id="tree")]
FILTERS = [
    pytest.param({}, id="temperature"),
    pytest.param({"temperature": 0.5}, id="cold"),
    pytest.param({"top_k": 3}, id="top_k"),
    pytest.param({"top_p": 0.7}, id="top_p"),
    pytest.param({"min_p": 0.2}, id="min_p"),
    pytest.param({"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1}, id="all"),
]


@pytest.fixture
def eagle_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    put_stand_in(monkeypatch)
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt import runtime_context
    from sglang.srt.layers import dp_attention
    from sglang.srt.speculative import eagle_utils

    # 0.5.22 imports the op where it verifies.
    owner = spec_tree if hasattr(spec_tree, "sgl_verify_tree_greedy_cpu") else eagle_utils
    monkeypatch.setattr(owner, "sgl_verify_tree_greedy_cpu", follow_the_target)
    flags = {"use_rejection_sampling": False, "accept_threshold_single": 1.0, "accept_threshold_acc": 1.0}
    spec = SimpleNamespace(**{f"speculative_{name}": value for name, value in flags.items()})
    monkeypatch.setattr(eagle_utils, "get_spec", lambda: spec)
    parallel = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    monkeypatch.setattr(dp_attention, "is_dp_attention_enabled", lambda: False)
    return eagle_utils


def follow_the_target(**tree: Any) -> None:
    """Slow and obvious: from the root, take the child whose token the target chose."""
    requests, nodes = tree["candidates"].shape
    for request in range(requests):
        path = [0]
        while True:
            wanted = tree["target_predict"].view(requests, nodes)[request, path[-1]]
            tree["predicts"].view(requests, nodes)[request, path[-1]] = wanted
            child = tree["retrive_next_token"][request, path[-1]].item()
            while child != -1 and tree["candidates"][request, child] != wanted:
                child = tree["retrive_next_sibling"][request, child].item()
            if child == -1 or len(path) == tree["accept_index"].shape[1]:
                break
            path.append(child)
        for depth, node in enumerate(path):
            tree["accept_index"][request, depth] = request * nodes + node
        tree["accept_token_num"][request] = len(path) - 1


def target_logits(nodes: int) -> torch.Tensor:
    return torch.randn(nodes, VOCAB, generator=torch.Generator().manual_seed(3)) * 0.8


def filtered(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Return the distribution that the sampling parameters ask for, in plain Python."""
    probs = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    ranked = sorted(range(VOCAB), key=lambda token: -probs[token])
    kept, mass = [], 0.0
    for rank, token in enumerate(ranked):
        if (top_k and rank >= top_k) or mass > top_p or probs[token] < min_p * probs[ranked[0]]:
            break
        kept.append(token)
        mass += probs[token]
    return [probs[token] / mass if token in kept else 0.0 for token in range(VOCAB)]


def verify(eagle_utils: ModuleType, shape: dict[str, Any], parameters: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Verify the same drafted tree for every request; return the tokens that each request emits."""
    requests, nodes = len(parameters), len(shape["tokens"])

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([p.get(name, default) for p in parameters], dtype=dtype)

    def rows(values: list[int]) -> torch.Tensor:
        return torch.tensor([values] * requests)

    top_ks = column("top_k", 1 << 30, torch.int32)
    sampling = SimpleNamespace(
        temperatures=column("temperature", 1.0, torch.float32).view(-1, 1),
        top_ks=top_ks,
        top_ps=column("top_p", 1.0, torch.float32),
        min_ps=column("min_p", 0.0, torch.float32),
        need_top_k_sampling=any("top_k" in p for p in parameters),
        need_top_p_sampling=any("top_p" in p for p in parameters),
        need_min_p_sampling=any("min_p" in p for p in parameters),
        is_all_greedy=bool((top_ks == 1).all()),
        sampling_seed=column("seed", 0, torch.int64) if "seed" in parameters[0] else None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_watermark_candidates=False,
    )
    start = torch.tensor([p.get("seq_len", 10) for p in parameters])
    tree = SimpleNamespace(
        draft_token=rows(shape["tokens"]).flatten(),
        draft_token_num=nodes,
        max_tree_depth=shape["depth"],
        tree_topk=1,
        draft_probs=None,
        retrieve_index=torch.arange(requests * nodes).view(requests, nodes),
        retrieve_next_token=rows(shape["next_token"]),
        retrieve_next_sibling=rows(shape["next_sibling"]),
        positions=(start.view(-1, 1) + torch.arange(nodes)).flatten(),
    )
    batch = SimpleNamespace(
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=start,
        sampling_info=sampling,
        return_logprob=False,
    )
    logits = SimpleNamespace(next_token_logits=target_logits(nodes).repeat(requests, 1))
    predict, lens, index = eagle_utils.eagle_sample(tree, batch, logits)
    return [tuple(predict[index[i, :n].long()].tolist()) for i, n in enumerate(lens.tolist())]


def exact_emissions(shape: dict[str, Any], **parameters: Any) -> dict[tuple[int, ...], float]:
    """Return the probability of each emitted sequence: drawn tokens, down to where the tree has no such child."""
    logits = target_logits(len(shape["tokens"]))
    emissions: dict[tuple[int, ...], float] = {}

    def walk(node: int, emitted: tuple[int, ...], probability: float) -> None:
        children, child = {}, shape["next_token"][node]
        while child != -1:
            children[shape["tokens"][child]] = child
            child = shape["next_sibling"][child]
        for token, p in enumerate(filtered(logits[node], **parameters)):
            if p == 0:
                continue
            if token in children:
                walk(children[token], (*emitted, token), probability * p)
            else:
                emissions[(*emitted, token)] = probability * p

    walk(0, (), 1.0)
    return emissions


def assert_drawn_from(expected: dict[tuple[int, ...], float], seen: list[tuple[int, ...]]) -> None:
    counts = Counter(seen)
    strange = set(counts) - set(expected)
    assert not strange, f"emitted, but impossible: {strange}"
    cells = [(counts[key], probability * len(seen)) for key, probability in expected.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append(tuple(map(sum, zip(*rare, strict=True))))
    assert len(cells) > 2, f"too few outcomes to judge by: {expected}"
    observed, wanted = zip(*cells, strict=True)
    p_value = scipy.stats.chisquare(observed, wanted).pvalue
    assert p_value > SIGNIFICANCE, f"verify does not sample the target's distribution: p = {p_value:.1e}, {counts}"


@pytest.mark.stock_failure(AssertionError, r"verify does not sample the target's distribution")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parameters", FILTERS)
def test_emitted_tokens_follow_the_target(
    eagle_utils: ModuleType, shape: dict[str, Any], parameters: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    seen = verify(eagle_utils, shape, [parameters] * REQUESTS)
    assert_drawn_from(exact_emissions(shape, **parameters), seen)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_test_can_tell_a_wrong_temperature(eagle_utils: ModuleType, shape: dict[str, Any]) -> None:
    torch.manual_seed(2)
    seen = verify(eagle_utils, shape, [{"temperature": 0.8}] * REQUESTS)
    with pytest.raises(AssertionError, match="does not sample"):
        assert_drawn_from(exact_emissions(shape), seen)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_requests_keep_their_argmax_beside_sampled_ones(eagle_utils: ModuleType, shape: dict[str, Any]) -> None:
    torch.manual_seed(2)
    greedy = {"top_k": 1}  # how the engine writes temperature 0
    alone = verify(eagle_utils, shape, [greedy])
    mixed = verify(eagle_utils, shape, [greedy, {"top_p": 0.95}] * 2000)
    assert mixed[::2] == alone * 2000
    assert_drawn_from(exact_emissions(shape, top_p=0.95), mixed[1::2])


def test_behind_the_package_verify_is_stock(eagle_utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = verify(eagle_utils, CHAIN, [{"top_k": 1}])
    monkeypatch.setattr(eagle_utils, "_samples_verify_on_cpu", False)
    assert verify(eagle_utils, CHAIN, [{"temperature": 1.0}] * 100) == greedy * 100


def test_a_seeded_draw_depends_on_seed_and_position_alone(eagle_utils: ModuleType) -> None:
    pairs = list(itertools.product(range(40), (10, 500)))
    parameters = [{"seed": seed, "seq_len": length} for seed, length in pairs]
    with torch.compiler.set_stance("force_eager"):  # the sampler is compiled otherwise, which takes a C++ compiler
        once = verify(eagle_utils, CHAIN, parameters)
        reverse = verify(eagle_utils, CHAIN, parameters[::-1])
    assert once == reverse[::-1]
    assert len(set(once)) > 3


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("speculative_use_rejection_sampling", True),
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.9),
    ],
)
def test_what_verify_would_ignore_is_refused_at_start(tmp_path: Path, flag: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}: not supported on CPU"):
        resolve(**eagle_arguments(tmp_path, **{flag: value}))
