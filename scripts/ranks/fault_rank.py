"""One rank: the engine's own in-place all-reduce by torch symmetric memory, against torch.distributed; prints JSON.

    fault_rank.py RANK WORLD PORT cuda|cpu real|stand-in

Real on a GPU: the groups, the symmetric buffer, the rendezvous, the two-shot kernel. The engine switches the
communicator off where there is no multicast; a release without the switch for that is told that there is, which
at two ranks selects no other kernel. On a CPU buffer and kernel are stood in for. ``stand-in`` also takes the place of
the compiled kernel package, for a release whose own is not installed: none of its kernels runs here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ranks.kernel_stand_in import stand_in_for_the_kernels

_SWITCH = "SGLANG_TORCH_SYMM_MEM_TWO_SHOT_WITHOUT_MULTICAST"
_FLAGS = (
    "use_pynccl", "use_pymscclpp", "use_mscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce",
    "use_hpu_communicator", "use_xpu_communicator", "use_npu_communicator",
)  # fmt: skip
_CPU_BYTES = 1024
_COUNT = 256


def main(rank: int, world: int, port: str, device: str, package: str) -> None:
    """Reduce in every case and print what came of it."""
    if package == "stand-in":
        stand_in_for_the_kernels()
    os.environ[_SWITCH] = "1"
    os.environ["SGLANG_OPT_USE_INKLING_CUSTOM_AR"] = "0"
    import torch
    from sglang.srt.distributed import parallel_state

    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    parallel_state.init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, backend)
    group = _group(parallel_state, rank, world, backend)
    made = (_on_gpu if device == "cuda" else _on_cpu)(group, rank)
    group.torch_symm_mem_comm = made
    over = made.max_size // 2 + 1024
    cases = {
        "bf16": (_COUNT, torch.bfloat16),
        "float32": (_COUNT, torch.float32),
        "oversize": (over, torch.bfloat16),
    }
    ways: dict[str, Callable[[Any], Any]] = {" in place": lambda tensor: group._all_reduce_in_place(tensor) or tensor}
    if device == "cuda":  # as a model calls it; on a CPU that is a sum without the communicator
        ways[" through the group"] = group.all_reduce
    found = {
        name + suffix: _compare(group, reduce, rank, *case, device)
        for suffix, reduce in ways.items()
        for name, case in cases.items()
    }
    print(json.dumps({"cases": found, "switch": _SWITCH in _switches(), "buffer": made.max_size}), flush=True)
    torch.distributed.barrier(group=group.cpu_group)
    os._exit(0)  # an orderly end of one rank can abort the other, which still holds a connection


def _switches() -> str:
    import sglang.srt.environ as environ

    return " ".join(dir(environ.envs))


def _group(parallel_state: Any, rank: int, world: int, backend: str) -> Any:
    import inspect

    known = inspect.signature(parallel_state.GroupCoordinator.__init__).parameters
    flags = dict.fromkeys([flag for flag in _FLAGS if flag in known], False)
    return parallel_state.GroupCoordinator([list(range(world))], rank, backend, **flags)


def _on_gpu(group: Any, rank: int) -> Any:
    import torch
    from sglang.srt.distributed.device_communicators import torch_symm_mem as module

    real = module.torch_symm_mem
    if _SWITCH not in _switches():

        def rendezvous(buffer: Any, name: str) -> Any:
            real.rendezvous(buffer, name)
            return SimpleNamespace(multicast_ptr=1)

        module.torch_symm_mem = SimpleNamespace(empty=real.empty, rendezvous=rendezvous)
    made = module.TorchSymmMemCommunicator(group.cpu_group, torch.device("cuda", rank))
    if made.disabled:
        raise RuntimeError("the engine's symmetric-memory communicator is off on these boards")
    return made


def _on_cpu(group: Any, rank: int) -> Any:
    import torch
    from sglang.srt.distributed.device_communicators.torch_symm_mem import TorchSymmMemCommunicator

    def two_shot(buffer: Any, _operation: str, _name: str) -> None:
        torch.distributed.all_reduce(buffer, group=group.device_group)

    torch.ops.symm_mem = SimpleNamespace(two_shot_all_reduce_=two_shot)
    made = TorchSymmMemCommunicator.__new__(TorchSymmMemCommunicator)
    buffer = torch.empty(_CPU_BYTES // 2, dtype=torch.bfloat16)
    vars(made).update(
        disabled=False, dtype=torch.bfloat16, world_size=2, device_capability=9, max_size=_CPU_BYTES,
        has_multicast=False, device=torch.device("cpu"), group=SimpleNamespace(group_name="tp"), buffer=buffer,
    )  # fmt: skip
    return made


def _compare(group: Any, reduce: Callable[[Any], Any], rank: int, count: int, dtype: Any, device: str) -> Any:
    """Return whether the sum is torch.distributed's, with the ends of both; or the error."""
    import torch

    values = torch.full((count,), rank + 1.001, dtype=dtype, device=device)
    known = values.clone()
    torch.distributed.all_reduce(known, group=group.device_group)
    try:
        found = reduce(values.clone())
        equal = bool(torch.equal(found, known))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"equal": equal, "found": _ends(found), "nccl": _ends(known)}


def _ends(tensor: Any) -> list[float]:
    return [tensor[0].item(), tensor[-1].item()]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
