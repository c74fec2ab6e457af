"""The kernel that keeps a target step for the draft: by Triton's interpreter, and compiled for boards not at hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.stock_failure(AssertionError, "^no such kernel")

# The interpreter is chosen when Triton is imported, so by a process of its own.
_COMPARE = """
import random, torch, triton
from sglang.kernels.ops.speculative import keep_step as module

def by_kernel(rows, lens, hidden, tokens, kept_hidden, kept_tokens, width):
    size = kept_hidden.shape[1]
    block = min(1024, triton.next_power_of_2(size))
    grid = (len(rows), triton.cdiv(size, block))
    module._keep_step_kernel[grid](
        rows, lens, hidden, hidden.stride(0), tokens, kept_hidden, kept_tokens, size, WIDTH=width, BLOCK=block
    )

dice = random.Random(0)
for case in range(12):
    width, size, pool = dice.choice([4, 16]), dice.choice([1, 24, 1024, 1500]), dice.randint(1, 9)
    number = dice.randint(1, pool)
    kept = torch.float32 if case % 3 else torch.bfloat16
    rows = torch.tensor(dice.sample(range(pool), number))
    lens = torch.tensor([dice.randint(0, 5 * width) for _ in range(number)])
    # A part of a larger tensor: what a graph returns.
    hidden = torch.randn(number + 2, size + 8)[:number, :size].to(kept)
    hidden = torch.randn(number + 2, size + 8).to(kept)[:number, :size] if case % 2 else hidden.contiguous()
    tokens = torch.randint(0, 1000, (number,), dtype=torch.int32 if case % 2 else torch.int64)
    kept_hidden, kept_tokens = torch.randn(pool * width, size).to(kept), torch.randint(0, 9, (pool * width,))
    expected = kept_hidden.clone(), kept_tokens.clone()
    module.keep_step(rows, lens, hidden, tokens, *expected, width)  # on a CPU: without the kernel
    by_kernel(rows, lens, hidden, tokens, kept_hidden, kept_tokens, width)
    assert torch.equal(kept_hidden, expected[0]) and torch.equal(kept_tokens, expected[1]), case
    for at, (row, length) in enumerate(zip(rows.tolist(), lens.tolist())):
        slot = row * width + length % width
        assert torch.equal(kept_hidden[slot], hidden[at]) and kept_tokens[slot] == tokens[at], case
print("equal")
"""


def _kernel_is_there() -> None:
    import importlib.util

    assert importlib.util.find_spec("sglang.kernels.ops.speculative.keep_step"), "no such kernel"


def test_the_kernel_writes_what_the_plain_operations_write() -> None:
    _kernel_is_there()
    environ = dict(os.environ) | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", _COMPARE], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr[-2000:]


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_the_kernel_compiles_for(capability: int) -> None:
    _kernel_is_there()
    import triton
    from sglang.kernels.ops.speculative import keep_step as module
    from triton.backends.compiler import GPUTarget

    names = module._keep_step_kernel.arg_names
    types = ["*i64", "*i64", "*bf16", "i32", "*i64", "*bf16", "*i64", "i32", "constexpr", "constexpr"]
    source = triton.compiler.ASTSource(
        fn=module._keep_step_kernel, signature=dict(zip(names, types, strict=True)), constexprs={(8,): 16, (9,): 1024}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(compiled.asm["cubin"]) > 0
