"""One rank: what the engine's automatic PCIe-IPC says of these boards; prints JSON.

links_rank.py RANK WORLD PORT
"""

from __future__ import annotations

import json
import os
import sys


def main(rank: int, world: int, port: str) -> None:
    """Ask for the boards' links, and run the self-check whatever they are."""
    import torch
    import torch.distributed as dist
    from sglang.srt.distributed.device_communicators import pcie_ipc_auto as auto

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group = dist.group.WORLD
    own = auto._identify(torch.device("cuda", rank))
    known = auto._gather(own, group)
    facts = auto._gather(auto._probe_links(own, known), group)
    found = {
        "refusal": auto.refusal(facts, one_host=True, symm_mem_requested=False),
        "self_check": auto._self_check([one.uuid for one in facts], group),
        "nvlink_peers": [list(one.nvlink_peers) for one in facts],
        "errors": [one.error for one in facts],
    }
    print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
