"""Several machines for one engine: SGLang's own flags for each, from the number of nodes and the address of the first.

SGLang joins the nodes itself (``--nnodes``, ``--node-rank``, ``--dist-init-addr``). Tensor and pipeline sizes count
the GPUs of all nodes; each node takes its share. Node 0 answers requests, the others only ``/health``.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from sglang_bw.recipes.flags import Flag, Flags

# Beside the server's own port and the ones that the engine derives from it.
DEFAULT_HEAD_PORT = 20000
UNKNOWN_HEAD = f"NODE-0:{DEFAULT_HEAD_PORT}"
_NAME = re.compile(r"(?!-)[A-Za-z0-9.-]{1,253}(?<!-)")


@dataclass(frozen=True)
class Nodes:
    """One node's place among several.

    :ivar count: nodes in all, at least 2.
    :ivar rank: of this one, from 0.
    :ivar head: ``ADDR:PORT`` of node 0, which all others can reach; not the port of requests.
    """

    count: int
    rank: int
    head: str

    def flags(self) -> Flags:
        """Return what the engine of this node is told."""
        return (
            Flag("nnodes", (str(self.count),)),
            Flag("node-rank", (str(self.rank),)),
            Flag("dist-init-addr", (self.head,)),
        )


def head(text: str) -> str:
    """Return ``ADDR:PORT``, the port added where there is none.

    :raises ValueError: it is no such address.
    """
    host, colon, port = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, colon, port = text, "", ""
    elif not colon:
        host, port = text, ""
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if host.startswith("["):
        ipaddress.IPv6Address(bare)
    elif not _NAME.fullmatch(bare):
        raise ValueError(f"{text!r} is no ADDR:PORT such as 10.0.0.1:{DEFAULT_HEAD_PORT} or [fd00::1]:20000")
    number = port or str(DEFAULT_HEAD_PORT)
    if not (number.isascii() and number.isdigit() and 0 < int(number) < 65536):
        raise ValueError(f"{number!r} is no port")
    return f"{host}:{number}"
