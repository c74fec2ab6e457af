"""One child of the PCIe-IPC self-check with kernels that run on a CPU and misbehave on demand.

``python pcie_ipc_stand_in.py SELF_CHECK BEHAVIOUR PLAN``: SELF_CHECK is the engine's file, which this loads by path as
the engine's own children do; PLAN comes from it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ODD_ONE = 1  # the rank that misbehaves


class GlooKernels:
    """The reference is gloo's sum, the kernel under test a gather and a sum of its own."""

    def __init__(self, plan: Any, behaviour: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.device = torch.device("cpu")
        self._odd = behaviour if plan.rank == ODD_ONE else ""
        self._dist, self._torch, self._world_size = dist, torch, plan.world_size
        store = dist.FileStore(str(Path(plan.folder) / "store"), plan.world_size)
        dist.init_process_group("gloo", store=store, rank=plan.rank, world_size=plan.world_size)

    def barrier(self) -> None:
        self._dist.barrier()

    def reference(self, inputs: Any) -> Any:
        summed = inputs.float()
        self._dist.all_reduce(summed)
        return summed.to(inputs.dtype)

    def launches(self, _sample: Any) -> Iterator[tuple[str, int, Callable[[Any, Any], None]]]:
        yield "gathered", 2, self._launch
        yield "gathered again", 2, self._launch

    def _launch(self, inp: Any, out: Any) -> None:
        if self._odd == "hangs":
            # As a kernel does: nothing but SIGKILL ends it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        if self._odd == "crashes":
            sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
            sys.stderr.flush()
            os._exit(7)
        parts = [self._torch.empty_like(inp, dtype=self._torch.float32) for _ in range(self._world_size)]
        self._dist.all_gather(parts, inp.float())
        out.copy_(sum(parts))
        if self._odd == "is wrong":
            out[-1] += 1


def main(self_check: str, behaviour: str, plan: str) -> None:
    if behaviour == "never starts" and json.loads(plan)["rank"] == ODD_ONE:
        time.sleep(3600)
    spec = importlib.util.spec_from_file_location("pcie_ipc_self_check", self_check)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.SIZES = (64, 4096)
    module.run_rank(module.RankPlan(**json.loads(plan)), lambda plan: GlooKernels(plan, behaviour))


if __name__ == "__main__":
    main(*sys.argv[1:])
