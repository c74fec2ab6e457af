"""A small engine of our own: real Triton kernels behind the names that the check looks for."""

from __future__ import annotations

from pathlib import Path

KERNELS = """
import torch, triton, triton.language as tl

@triton.jit
def fused_moe_kernel(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_SIZE_K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_SIZE_K):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        right = tl.load(b + n[None, :] * K + start + k[:, None])
        total += tl.dot(left, right)
    tl.store(c + m[:, None] * N + n[None, :], total)

@triton.jit
def broken(a, N: tl.constexpr):
    tl.store(a + tl.arange(0, N), this_is_not_defined)

def small_memory():
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 128 * 1024
"""

# The default configuration that a release had for FP8 without blocks, and the one that replaced it on small boards.
FP8 = """
def fused_experts_impl(hidden_states, w1, **_):
    if w1.dtype == torch.float8_e4m3fn:
        hidden_states = hidden_states.to(w1.dtype)
        tile, stages, warps = (128, 256, 128), 4, 8
        if KNOWS_SMALL_BOARDS and small_memory():
            tile, stages, warps = (64, 128, 256), 2, 4
        m, n, k = tile
        c = torch.empty((m, n), dtype=torch.float32, device=w1.device)
        fused_moe_kernel[(1,)](hidden_states, w1, c, 4096, m, n, k, num_stages=stages, num_warps=warps)
    else:
        c = torch.empty((16, 16), dtype=torch.float32, device=w1.device)
        kernel = torch.zeros((1,), device=w1.device)
        fused_moe_kernel[(1,)](c, c, c, 4096, 16, 16, 16)
"""
BROKEN = """
def fused_experts_impl(hidden_states, w1, **_):
    broken[(1,)](hidden_states, 16)
    c = torch.empty((16, 16), dtype=torch.float32, device=w1.device)
    fused_moe_kernel[(1,)](c, c, c, 4096, 16, 16, 16)
"""
RAISES = """
def fused_experts_impl(hidden_states, w1, **_):
    raise ValueError("the layer is not ready")
"""
DIES = """
import os
def fused_experts_impl(hidden_states, w1, **_):
    os.abort()
"""
DIES_ONCE = (
    DIES.replace(
        "    os.abort()",
        "    if w1.shape[0] == 384 and w1.dtype == torch.uint8 and len(hidden_states) == 16:\n        os.abort()",
    )
    + """
    c = torch.empty((16, 16), dtype=torch.float32, device=w1.device)
    fused_moe_kernel[(1,)](c, c, c, 4096, 16, 16, 16)
"""
)
NOT_THERE = ""
CANNOT_BE_IMPORTED = "import a_package_that_is_missing\n"


def write(folder: Path, experts: str, *, knows_small_boards: bool = False) -> Path:
    """Write an engine whose MoE layer is ``experts``; it has no other part."""
    module = folder / "sglang" / "srt" / "layers" / "moe" / "fused_moe_triton" / "fused_moe.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"{KERNELS}\nKNOWS_SMALL_BOARDS = {knows_small_boards}\n{experts}")
    (folder / "sglang" / "version.py").write_text('__version__ = "0.0.1"\n')
    (folder / "sglang" / "srt" / "server_args.py").write_text(
        "class ServerArgs:\n    def __init__(self, model_path): ...\n"
        "def set_global_server_args_for_scheduler(_arguments): ...\n"
    )
    for package in [folder / "sglang", *(path for path in (folder / "sglang").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    return folder
