"""The CPU path without the kernel package: imports, PyTorch ops against slow references, and the backend choice.

Each reference says in plain Python what the op means; none shares arithmetic with the op. Trees grow as the EAGLE
draft grows them, from random scores, and are pruned at random, so that nodes without their parent occur.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import random
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.cpu_package import eagle_arguments, put_stand_in, resolve

USERS_OF_THE_PACKAGE = [
    "sglang.kernels.ops.kvcache.cache_move",
    "sglang.srt.mem_cache.allocation",
    "sglang.kernels.ops.speculative.eagle",
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.srt.speculative.eagle_utils",
    "sglang.kernels.ops.speculative.multi_layer_eagle",
    "sglang.srt.speculative.ngram_worker",
    "sglang.srt.speculative.eagle_worker_v2",
]
# After the bar: where 0.5.22 imports it.
IMPORTED_OPS = [
    "sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_cpu",
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_cpu",
    "sglang.kernels.ops.speculative.eagle.fill_accept_out_cache_loc_cpu",
    "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_cpu",
    "sglang.kernels.ops.speculative.cache_locs|sglang.srt.speculative.eagle_worker_common.assign_draft_cache_locs_contiguous_cpu",
    "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_cpu",
    "sglang.kernels.ops.speculative.spec_tree|sglang.srt.speculative.eagle_utils.sgl_build_tree_kernel_efficient_cpu",
    "sglang.kernels.ops.speculative.spec_tree|sglang.srt.speculative.eagle_utils.sgl_verify_tree_greedy_cpu",
    "sglang.kernels.ops.speculative.multi_layer_eagle.rotate_input_ids_cpu",
    "sglang.kernels.ops.speculative.reconstruct_tree|sglang.srt.speculative.ngram_worker.reconstruct_indices_from_tree_mask",
]
FULL_MASK, QLEN_ONLY, BITPACKED = 0, 1, 2
TREES = [(1, 1), (1, 8), (2, 3), (2, 8), (4, 3), (4, 8), (8, 2), (8, 8)]


@pytest.fixture
def ops() -> ModuleType:
    return importlib.import_module("sglang.srt.hardware_backend.cpu.torch_ops")


IMPORT_EACH = """
import importlib, json, sys
failures = {}
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        failures[module] = str(error)
print(json.dumps(failures))
"""
WHERE_OPS_COME_FROM = """
import importlib, json, sys
where = {}
for name in sys.argv[1:]:
    places, _, op = name.rpartition(".")
    modules = [importlib.import_module(place) for place in places.split("|")]
    where[name] = next(getattr(module, op) for module in modules if hasattr(module, op)).__module__
print(json.dumps(where))
"""


def run_in_a_fresh_process(code: str, *names: str, path: Path | None = None) -> dict[str, Any]:
    """Run with no engine setting but the documented SGLANG_USE_CPU_ENGINE; return the JSON of the last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    if path:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "-W", "ignore", "-c", code, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def import_failures() -> dict[str, str]:
    return run_in_a_fresh_process(IMPORT_EACH, "sglang", *USERS_OF_THE_PACKAGE)


@pytest.mark.stock_failure(ModuleNotFoundError, r"^No module named 'sgl_kernel'")
@pytest.mark.parametrize("module", USERS_OF_THE_PACKAGE)
def test_imports(import_failures: dict[str, str], module: str) -> None:
    if module in import_failures:
        raise ModuleNotFoundError(import_failures[module])


def test_imports_sglang(import_failures: dict[str, str]) -> None:
    assert "sglang" not in import_failures


@pytest.mark.stock_failure(ModuleNotFoundError, r"^No module named 'sgl_kernel'")
def test_hashes_a_seed() -> None:
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    seeds = torch.tensor([7, 2**40 + 3], dtype=torch.int64).to(torch.uint64)
    hashed = murmur_hash32(seeds, torch.tensor([5, 9]), torch.arange(3))
    expected = [[murmur3(struct.pack("<QII", s, p, c)) for c in range(3)] for s, p in ((7, 5), (2**40 + 3, 9))]
    assert hashed.dtype == torch.uint32
    assert hashed.to(torch.int64).tolist() == expected


def test_every_op_comes_from_the_package_where_it_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    op = "def op(*_): ...\n"
    (package / "__init__.py").write_text(
        f"{op}def __getattr__(name):\n    if name.endswith('_cpu'): return op\n    raise AttributeError(name)\n"
    )
    (package / "speculative.py").write_text(op.replace("op(", "reconstruct_indices_from_tree_mask("))
    where = run_in_a_fresh_process(WHERE_OPS_COME_FROM, *IMPORTED_OPS, path=tmp_path)
    assert {module.partition(".")[0] for module in where.values()} == {"sgl_kernel"}, where


def test_the_package_is_told_by_its_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sglang.srt.utils.common import has_cpu_kernel_package

    has_package = has_cpu_kernel_package.__wrapped__
    assert not has_package()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sgl_kernel.py").write_text("")  # the CUDA build: the same name, none of the ops
    assert not has_package()
    monkeypatch.delitem(sys.modules, "sgl_kernel")
    (tmp_path / "sgl_kernel.py").write_text("def copy_all_layer_kv_cache_cpu(): ...\n# longer than the cached one\n")
    importlib.invalidate_caches()
    assert has_package()
    monkeypatch.delitem(sys.modules, "sgl_kernel")
    (tmp_path / "sgl_kernel.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')\n")
    importlib.invalidate_caches()
    assert not has_package()


# ----------------------------------------------------------------------------------------------- backend choice


PLAIN = {"speculative_algorithm": None, "speculative_draft_model_path": None, "speculative_num_steps": None}
PLAIN |= {"speculative_eagle_topk": None, "speculative_num_draft_tokens": None}


@pytest.mark.stock_failure(AssertionError, r"attention backend of a \S+ without the package: torch_native")
@pytest.mark.parametrize("flags", [pytest.param({}, id="eagle3"), pytest.param(PLAIN, id="plain")])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_backend_that_can_draft_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, flags: dict[str, Any]
) -> None:
    put_stand_in(monkeypatch)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    backend = resolve(**eagle_arguments(tmp_path, **flags)).attention_backend
    assert backend == "intel_amx", f"attention backend of a {machine} without the package: {backend}"


def test_an_explicit_backend_stays(tmp_path: Path) -> None:
    arguments = eagle_arguments(tmp_path, **PLAIN, attention_backend="torch_native")
    assert resolve(**arguments).attention_backend == "torch_native"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_with_the_package_the_choice_is_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    from sglang.srt.arg_groups import overrides, platform_hook

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(overrides, "has_cpu_kernel_package", lambda: True)
    monkeypatch.setattr(platform_hook, "has_cpu_kernel_package", lambda: True)
    assert resolve(**eagle_arguments(tmp_path, **PLAIN)).attention_backend == "torch_native"


# -------------------------------------------------------------------------------------------------- cache slots


def random_table(rng: random.Random, rows: int = 20, width: int = 64) -> torch.Tensor:
    return torch.tensor([[rng.randrange(10_000) for _ in range(width)] for _ in range(rows)], dtype=torch.int32)


def random_windows(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return distinct pool rows with a start and an end each; some windows are empty."""
    batch = rng.randrange(1, 17)
    starts = [rng.randrange(40) for _ in range(batch)]
    ends = [start + rng.choice([0, 1, 4, rng.randrange(20)]) for start in starts]
    return torch.tensor(rng.sample(range(20), batch)), torch.tensor(starts), torch.tensor(ends)


@pytest.mark.parametrize("seed", range(20))
def test_assign_extend_cache_locs(ops: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    table, (rows, starts, ends) = random_table(rng), random_windows(rng)
    out = torch.full((int((ends - starts).sum()) + 5,), -7, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, table.shape[1])
    windows = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    expected = [table[row, col].item() for row, start, end in windows for col in range(start, end)]
    assert out.tolist() == expected + [-7] * 5


@pytest.mark.parametrize("seed", range(20))
def test_assign_req_to_token_pool(ops: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    table, (rows, starts, ends) = random_table(rng), random_windows(rng)
    locs = torch.arange(20_000, 20_000 + int((ends - starts).sum()))
    expected, following = table.clone(), iter(locs.tolist())
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for col in range(start, end):
            expected[row, col] = next(following)
    ops.assign_req_to_token_pool_cpu(rows, table, starts.int(), ends.int(), locs, table.shape[1])
    assert table.tolist() == expected.tolist()


@pytest.mark.parametrize(("topk", "steps"), TREES)
def test_draft_slots_and_their_attention_table(ops: ModuleType, topk: int, steps: int) -> None:
    rng = random.Random(topk * 100 + steps)
    table, batch = random_table(rng, width=200), rng.randrange(1, 17)
    rows = rng.sample(range(20), batch)
    lens = [rng.randrange(1, 200 - topk * steps) for _ in rows]
    out = torch.full((batch * topk * steps,), -7, dtype=torch.int64)
    arguments = torch.tensor(rows), table, torch.tensor(lens)
    ops.assign_draft_cache_locs_contiguous_cpu(*arguments, out, 200, topk, steps)
    expected = [
        table[row, length + branch * steps + step].item()
        for row, length in zip(rows, lens, strict=True)
        for branch in range(topk)
        for step in range(steps)
    ]
    assert out.tolist() == expected

    seen = ops.build_draft_decode_metadata_cpu(table, torch.tensor(rows), torch.tensor(lens), topk, steps, 200)
    assert seen.shape == (batch * topk, max(lens) + steps)
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        for branch in range(topk):
            own = (i * topk + branch) * steps
            prefix = table[row, :length].tolist()
            assert seen[i * topk + branch, : length + steps].tolist() == prefix + expected[own : own + steps]


@pytest.mark.parametrize("seed", range(10))
def test_copy_all_layer_kv_cache(ops: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    shapes = [((40, 2, 8), torch.bfloat16), ((40, 2, 8), torch.float32), ((40, 3, 5), torch.float16)]
    buffers = [torch.randn(shape).to(dtype) for shape, dtype in shapes]
    src = [rng.randrange(40) for _ in range(12)]
    tgt = rng.sample(range(40), 12)  # overlaps src: a slot may be read and written
    expected = [buffer.tolist() for buffer in buffers]
    for slots in expected:
        moved = [slots[s] for s in src]
        for t, value in zip(tgt, moved, strict=True):
            slots[t] = value
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].nbytes for buffer in buffers])
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor(tgt), torch.tensor(src))
    assert [buffer.tolist() for buffer in buffers] == expected
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([]), torch.tensor([]))
    assert [buffer.tolist() for buffer in buffers] == expected


# ---------------------------------------------------------------------------------------------- accepted tokens


@pytest.mark.parametrize("seed", range(10))
def test_accepted_slots_and_bonus_tokens(ops: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    batch, width, tree = rng.randrange(1, 17), rng.randrange(1, 9), 12
    lens = [rng.randrange(1, width + 1) for _ in range(batch)]
    index = [
        [i * tree + node for node in sorted(rng.sample(range(tree), lens[i]))] + [-1] * (width - lens[i])
        for i in range(batch)
    ]
    locs = torch.tensor(rng.sample(range(10_000), batch * tree))
    out = torch.zeros(batch * width, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(torch.tensor(index, dtype=torch.int32), locs, out)
    expected = [locs[i].item() for row in index for i in row if i != -1]
    assert out.tolist() == expected + [0] * (batch * width - len(expected))

    tokens = torch.tensor([[rng.randrange(1000) for _ in range(width)] for _ in range(batch)], dtype=torch.int32)
    bonus = torch.zeros(batch, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(tokens.flatten(), torch.tensor(lens, dtype=torch.int32), bonus, width)
    assert bonus.tolist() == [row[length - 1] for row, length in zip(tokens.tolist(), lens, strict=True)]


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_rotate_input_ids(ops: ModuleType, seed: int, selected: bool) -> None:
    rng = random.Random(seed)
    lens = [rng.choice([0, 1, 2, rng.randrange(1, 12)]) for _ in range(rng.randrange(1, 17))]
    starts = [sum(lens[:i]) for i in range(len(lens))]
    ids = torch.arange(sum(lens) + 3)  # three padding tokens that stay
    new = torch.tensor([[1000 + i] for i in range(len(lens))])
    select = [start + rng.randrange(max(n, 1)) for start, n in zip(starts, lens, strict=True)]
    expected = ids.tolist()
    for i, (start, n) in enumerate(zip(starts, lens, strict=True)):
        for at in range(start, start + n - 1):
            expected[at] = ids[at + 1].item()
        if n:
            expected[select[i] if selected else start + n - 1] = 1000 + i
    arguments = torch.tensor(starts), torch.tensor(lens), new
    ops.rotate_input_ids_cpu(ids, *arguments, torch.tensor(select) if selected else None)
    assert ids.tolist() == expected


# --------------------------------------------------------------------------------------------------------- trees


@dataclass(frozen=True)
class Tree:
    """One request's drafted tree, and where its nodes hang.

    ``selected`` lists candidate numbers in rising order; node i is ``selected[i - 1]``, node 0 the root.
    ``ancestors[i]`` lists node i's nodes up to its root, itself first, without node 0; ``parent[i]`` is None for a
    node whose parent was not selected.
    """

    parent_list: list[int]
    selected: list[int]
    parent: dict[int, int | None]
    ancestors: dict[int, list[int]]

    def children(self, node: int) -> list[int]:
        return [child for child in sorted(self.parent) if self.parent[child] == node]


def grow(rng: random.Random, topk: int, steps: int, nodes: int, closed: bool) -> Tree:
    """Draft like EAGLE: each step expands every beam entry topk times and keeps topk of all those."""
    origin: dict[int, int | None] = dict.fromkeys(range(topk))  # candidate -> parent candidate, None for the root
    beam = list(range(topk))
    parent_list = list(range(-1, topk))
    for step in range(1, steps):
        first = topk + (step - 1) * topk * topk
        offspring = [(first + i, beam[i // topk]) for i in range(topk * topk)]
        origin.update(offspring)
        beam = rng.sample([candidate for candidate, _ in offspring], topk)
        parent_list += beam
    # The engine concatenates all but the last step's parents.
    parent_list = parent_list[:-topk] if steps > 1 else []

    wanted = min(nodes - 1, len(origin))
    selected = rng.sample(sorted(origin), wanted)
    if closed:
        selected = []
        while len(selected) < wanted:
            free = [c for c, p in origin.items() if c not in selected and (p is None or p in selected)]
            selected.append(rng.choice(free))
    selected.sort()
    number = {candidate: i for i, candidate in enumerate(selected, start=1)}
    parent = {number[c]: 0 if origin[c] is None else number.get(origin[c]) for c in selected}
    ancestors = {0: []}
    for node in parent:
        chain, at = [], node
        while at:
            chain.append(at)
            at = parent[at]
        ancestors[node] = chain
    return Tree(parent_list, selected, parent, ancestors)


def forest(seed: int, topk: int, steps: int, *, closed: bool = False) -> list[Tree]:
    rng = random.Random(seed)
    candidates = topk + (steps - 1) * topk * topk
    nodes = steps + 1 if topk == 1 else min(rng.randrange(2, 25), candidates + 1)
    return [grow(rng, topk, steps, nodes, closed or topk == 1) for _ in range(rng.randrange(1, 17))]


def build(ops: ModuleType, trees: list[Tree], lens: list[int], topk: int, steps: int, mode: int) -> Any:
    batch, nodes = len(trees), len(trees[0].selected) + 1
    cells = batch * nodes * nodes + (nodes * sum(lens) if mode == FULL_MASK else 0)
    links = [torch.full((batch, nodes), -1, dtype=torch.int64) for _ in range(3)]
    built = SimpleNamespace(
        mask=torch.ones(cells + 3, dtype=torch.bool),
        positions=torch.empty(batch * nodes, dtype=torch.int64),
        index=links[0],
        next_token=links[1],
        next_sibling=links[2],
        nodes=nodes,
    )
    ops.build_tree_kernel_efficient_cpu(
        torch.tensor([tree.parent_list for tree in trees], dtype=torch.int64),
        torch.tensor([tree.selected for tree in trees]),
        torch.tensor(lens),
        built.mask,
        built.positions,
        built.index,
        built.next_token,
        built.next_sibling,
        topk,
        steps,
        nodes,
        mode,
    )
    return built


@pytest.mark.parametrize("mode", [QLEN_ONLY, FULL_MASK])
@pytest.mark.parametrize(("topk", "steps"), TREES)
@pytest.mark.parametrize("seed", range(4))
def test_build_tree(ops: ModuleType, seed: int, topk: int, steps: int, mode: int) -> None:
    trees = forest(seed, topk, steps)
    lens = [random.Random(seed + i).randrange(1, 30) for i in range(len(trees))]
    built = build(ops, trees, lens, topk, steps, mode)
    nodes, mask = built.nodes, []
    for i, tree in enumerate(trees):
        for node in range(nodes):
            children = tree.children(node)
            assert built.next_token[i, node] == (children[0] if children else -1)
            siblings = tree.children(tree.parent[node]) if node and tree.parent[node] is not None else []
            later = [other for other in siblings if other > node]
            assert built.next_sibling[i, node] == (later[0] if later else -1)
            assert built.positions[i * nodes + node] == lens[i] + len(tree.ancestors[node])
            seen = {0, *tree.ancestors[node]}
            mask += [True] * (lens[i] if mode == FULL_MASK else 0) + [other in seen for other in range(nodes)]
    assert built.index.flatten().tolist() == list(range(len(trees) * nodes))
    assert built.mask.tolist() == mask + [True] * 3


def test_build_tree_leaves_no_mode_half_done(ops: ModuleType) -> None:
    trees = forest(1, 4, 3)
    with pytest.raises(NotImplementedError, match="tree mask mode 2 is not supported"):
        build(ops, trees, [5] * len(trees), 4, 3, BITPACKED)


@pytest.mark.parametrize(("topk", "steps"), TREES)
@pytest.mark.parametrize("seed", range(4))
def test_links_from_a_mask_are_those_of_the_tree(ops: ModuleType, seed: int, topk: int, steps: int) -> None:
    trees = forest(seed, topk, steps, closed=True)
    lens = [7 + i for i in range(len(trees))]
    built = build(ops, trees, lens, topk, steps, QLEN_ONLY)
    positions = torch.zeros_like(built.positions)
    links = [torch.full_like(built.index, -1) for _ in range(3)]
    ops.reconstruct_indices_from_tree_mask(built.mask, torch.tensor(lens), positions, *links, len(trees), built.nodes)
    expected = [built.positions, built.index, built.next_token, built.next_sibling]
    assert [x.tolist() for x in (positions, *links)] == [x.tolist() for x in expected]


@pytest.mark.parametrize(("topk", "steps"), TREES)
@pytest.mark.parametrize("seed", range(4))
def test_verify_tree_greedy(ops: ModuleType, seed: int, topk: int, steps: int) -> None:
    trees = forest(seed, topk, steps)
    rng = random.Random(seed)
    batch = len(trees)
    built = build(ops, trees, [5] * batch, topk, steps, QLEN_ONLY)
    nodes, width = built.nodes, rng.randrange(1, steps + 2)
    vocab = topk + 1  # few tokens: long accepted paths are common
    tokens = [[rng.randrange(vocab) for _ in range(nodes)] for _ in trees]
    for i, tree in enumerate(trees):  # siblings differ
        for node in range(nodes):
            for child, token in zip(tree.children(node), rng.sample(range(vocab), topk), strict=False):
                tokens[i][child] = token
    target = torch.tensor([[rng.randrange(vocab) for _ in range(nodes)] for _ in trees])
    predicts = torch.full((batch * nodes,), -5, dtype=torch.int32)
    accept_index = torch.full((batch, width), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts,
        accept_index,
        accepted,
        torch.tensor(tokens),
        built.index,
        built.next_token,
        built.next_sibling,
        target,
    )
    expected = [-5] * (batch * nodes)
    for i, tree in enumerate(trees):
        path = [0]
        while len(path) < width:
            hits = [child for child in tree.children(path[-1]) if tokens[i][child] == target[i, path[-1]]]
            if not hits:
                break
            path.append(hits[0])
        for node in path:
            expected[i * nodes + node] = target[i, node].item()
        assert accepted[i] == len(path) - 1
        assert accept_index[i].tolist() == [i * nodes + node for node in path] + [-1] * (width - len(path))
    assert predicts.tolist() == expected


# ----------------------------------------------------------------------------------------------------- attention


@dataclass
class Cache:
    """A KV cache with requests of ragged lengths in random slots."""

    table: torch.Tensor
    rows: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lens: list[int]
    heads: int

    @classmethod
    def of(
        cls, lens: list[int], dtype: torch.dtype, seed: int, heads: int, kv_heads: int, dims: tuple[int, int]
    ) -> Cache:
        torch.manual_seed(seed)
        table = torch.randperm(20 * 64).view(20, 64).int()
        keys, values = (torch.randn(20 * 64, kv_heads, dim).to(dtype) for dim in dims)
        return cls(table, torch.randperm(20)[: len(lens)], keys, values, lens, heads)

    def expected(self, request: int, query: torch.Tensor, visible: Iterable[int], scale: float) -> torch.Tensor:
        """Return one query's attention over the positions ``visible`` of a request, in float64."""
        slots = [self.table[self.rows[request], at].item() for at in visible]
        out = []
        for head in range(self.heads):
            kv_head = head * self.keys.shape[1] // self.heads
            scores = [
                scale * sum(a * b for a, b in zip(query[head].tolist(), self.keys[slot, kv_head].tolist(), strict=True))
                for slot in slots
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = sum(w * self.values[slot, kv_head].double() for w, slot in zip(weights, slots, strict=True))
            out.append(total / sum(weights))
        return torch.stack(out)


SHAPES = [  # heads, KV heads, (QK dim, V dim)
    pytest.param(4, 4, (8, 8), id="mha"),
    pytest.param(4, 2, (8, 8), id="gqa"),
    pytest.param(6, 1, (12, 8), id="mla"),
]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), SHAPES)
def test_decode_attention(
    ops: ModuleType, heads: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    lens = [1, 2, 17, 40, 5]
    cache = Cache.of(lens, dtype, 3, heads, kv_heads, dims)
    q = torch.randn(5, heads, dims[0]).to(dtype)
    k, v = (torch.randn(5, kv_heads * dim).to(dtype) for dim in dims)
    loc = torch.stack([cache.table[cache.rows[i], n - 1] for i, n in enumerate(lens)]).long()
    o = torch.empty(5, heads, dims[1], dtype=dtype)
    ops.decode_attention_cpu(
        q, cache.keys, cache.values, 1.0, 1.0, o, k, v, loc, None, cache.table, cache.rows, torch.tensor(lens),
        0.3, 0.0, False, 0, None, None,
    )  # fmt: skip
    assert torch.equal(cache.keys[loc].flatten(1), k)
    assert torch.equal(cache.values[loc].flatten(1), v)
    for i, n in enumerate(lens):
        expected = cache.expected(i, q[i], range(n), 0.3)
        torch.testing.assert_close(o[i].double(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def extend(ops: ModuleType, cache: Cache, q: torch.Tensor, new: list[int], **how: Any) -> torch.Tensor:
    """Run the op on the last ``new`` tokens of each request; k and v come from the cache itself."""
    o = torch.full((q.shape[0], cache.heads, cache.values.shape[2]), float("nan"), dtype=q.dtype)
    starts = [sum(new[:i]) for i in range(len(new))]
    slots = [
        cache.table[cache.rows[i], n - e + j]
        for i, (n, e) in enumerate(zip(cache.lens, new, strict=True))
        for j in range(e)
    ]
    slots = torch.tensor(slots)
    k, v = (None, None) if how.pop("from_cache", False) else (cache.keys[slots], cache.values[slots])
    ops.extend_attention_cpu(
        q, k, v, o, cache.keys, cache.values, 1.0, 1.0, cache.table, cache.rows, torch.tensor(cache.lens),
        torch.tensor(new), torch.tensor(starts), max(new), 0.3, 0.0, False, 0, None, None, **how,
    )  # fmt: skip
    return o


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), SHAPES)
@pytest.mark.parametrize("how", ["causal", "from_cache", "full"])
def test_extend_attention(
    ops: ModuleType, heads: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype, how: str
) -> None:
    new = [1, 9, 4, 6, 0]  # whole prompts, chunks after a prefix, one token, nothing
    cache = Cache.of([1, 9, 12, 40, 3], dtype, 5, heads, kv_heads, dims)
    q = torch.randn(sum(new), heads, dims[0]).to(dtype)
    options = {"causal": {}, "from_cache": {"from_cache": True}, "full": {"is_causal": False}}[how]
    o = extend(ops, cache, q, new, **options)
    at = 0
    for i, n in enumerate(cache.lens):
        for j in range(new[i]):
            visible = range(n) if how == "full" else range(n - new[i] + j + 1)
            expected = cache.expected(i, q[at], visible, 0.3)
            torch.testing.assert_close(o[at].double(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
            at += 1


def test_a_prompt_without_a_prefix_may_have_heads_of_its_own(ops: ModuleType) -> None:
    """MLA models prefill with full heads, while the cache holds one latent head."""
    full = Cache.of([6, 3], torch.float32, 8, 4, 4, (8, 5))
    q = torch.randn(9, 4, 8)
    expected = extend(ops, full, q, [6, 3])
    slots = [full.table[row, at].item() for row, n in zip(full.rows, full.lens, strict=True) for at in range(n)]
    o = torch.empty_like(expected)
    ops.extend_attention_cpu(
        q, full.keys[slots], full.values[slots], o, torch.zeros(1280, 1, 12), torch.zeros(1280, 1, 10), 1.0, 1.0,
        full.table, full.rows, torch.tensor([6, 3]), torch.tensor([6, 3]), torch.tensor([0, 6]), 6, 0.3, 0.0,
        False, 0, None, None,
    )  # fmt: skip
    assert torch.equal(o, expected)


@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (2, 3), (4, 3), (8, 5)])
def test_a_node_attends_to_its_path_only(ops: ModuleType, topk: int, steps: int) -> None:
    trees = forest(topk, topk, steps)[:4]
    prefix = [1 + 7 * i for i in range(len(trees))]
    built = build(ops, trees, prefix, topk, steps, QLEN_ONLY)
    new = [built.nodes] * len(trees)
    cache = Cache.of([p + built.nodes for p in prefix], torch.float32, topk, 4, 2, (8, 8))
    q = torch.randn(sum(new), 4, 8)
    o = extend(ops, cache, q, new, tree_mask=built.mask)
    for i, tree in enumerate(trees):
        for node in range(built.nodes):
            visible = [*range(prefix[i]), *(prefix[i] + other for other in {0, *tree.ancestors[node]})]
            at = i * built.nodes + node
            expected = cache.expected(i, q[at], visible, 0.3)
            torch.testing.assert_close(o[at].double(), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"tree mask has \d+ cells, QLEN_ONLY needs"):
        extend(ops, cache, q, new, tree_mask=built.mask[:5])


UNSUPPORTED = [
    ({"k_scale": 0.5}, "KV scales"),
    ({"v_scale": 2.0}, "KV scales"),
    ({"logit_cap": 30.0}, "a logit cap"),
    ({"is_cross_attn": True}, "cross attention"),
    ({"encoder_lens": torch.tensor([3])}, "cross attention"),
    ({"sliding_window_size": 128}, "a sliding window"),
    ({"sinks": torch.zeros(4)}, "attention sinks"),
    ({"k_buffer": torch.zeros(8, 2, 8).to(torch.float8_e4m3fn)}, "a torch.float8_e4m3fn KV cache"),
]


@pytest.mark.parametrize("op", ["decode_attention_cpu", "extend_attention_cpu"])
@pytest.mark.parametrize(
    ("request_for", "named"), UNSUPPORTED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_attention_refuses_what_it_does_not_compute(
    ops: ModuleType, op: str, request_for: dict[str, Any], named: str
) -> None:
    q = torch.zeros(1, 4, 8)
    one = torch.tensor([1])
    arguments = {
        "q": q, "k": None, "v": None, "o": torch.empty_like(q), "k_buffer": torch.zeros(8, 2, 8),
        "v_buffer": torch.zeros(8, 2, 8), "k_scale": 1.0, "v_scale": 1.0, "req_to_token": torch.zeros(1, 8).int(),
        "req_pool_indices": torch.tensor([0]), "seq_lens": one, "scale": 1.0, "logit_cap": 0.0,
        "is_cross_attn": False, "sliding_window_size": 0, "encoder_lens": None, "sinks": None,
    }  # fmt: skip
    own = {
        "decode_attention_cpu": {"cache_loc": one, "attn_logits": None},
        "extend_attention_cpu": {"extend_seq_lens": one, "extend_start_loc": one - 1, "max_len_extend": 1},
    }[op]
    getattr(ops, op)(**arguments | own)
    with pytest.raises(NotImplementedError, match=f"does not support {named}"):
        getattr(ops, op)(**arguments | own | request_for)


# ------------------------------------------------------------------------------------------------------ sampling


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of a whole number of 4-byte blocks."""

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) % 2**32

    h = 0
    for (block,) in struct.iter_unpack("<I", data):
        h ^= rotate(block * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        h = (rotate(h, 13) * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("seed", range(5))
def test_murmur_hash(ops: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    seeds = [rng.randrange(2**64) for _ in range(6)]
    positions = [rng.randrange(2**31) for _ in seeds]
    columns = [rng.randrange(2**32) for _ in range(9)]
    hashed = ops.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    for i, (own, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [murmur3(struct.pack("<QII", own, position, column)) for column in columns]
        assert hashed[i].to(torch.int64).tolist() == expected
