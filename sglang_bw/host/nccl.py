"""Findings about NCCL and the environment variables that change what a server does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sglang_bw.host.fabric import Fabric
from sglang_bw.host.finding import Finding, Group
from sglang_bw.host.system import System

_NCCL = Group("NCCL")
_ENVIRONMENT = Group("Environment variables")
_LATENCY = ("NODE", "PHB", "SYS")


@dataclass(frozen=True)
class Variable:
    """A variable that matters: what it does, and when its value is a mistake.

    :ivar wrong: returns what the value costs, empty when it costs nothing.
    """

    name: str
    does: str
    wrong: Callable[[str], str] = lambda _value: ""
    fix: str = ""


def _when(*values: str, costs: str) -> Callable[[str], str]:
    return lambda value: costs if value.strip().lower() in values else ""


def _graph_file(value: str) -> str:
    return "" if value.strip() else "empty is not unset: reported to break NCCL at start"


def _level(value: str) -> str:
    if not value.strip().isdigit():
        return ""
    return "numbers are read differently from what most tables say"


def _contains(part: str, costs: str) -> Callable[[str], str]:
    return lambda value: costs if part in value.lower() else ""


_segments = _contains(
    "expandable_segments:true", "memory of this kind cannot be shared: custom and PCIe-IPC all-reduce die"
)

# Sources: NCCL's user guide ("Environment Variables"), SGLang 0.5.23's environ.py, reports of 8x RTX PRO 6000 hosts.
VARIABLES = (
    Variable("CUDA_VISIBLE_DEVICES", "which GPUs a process sees, and in which order; `serve --gpus` sets it"),
    Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID numbers GPUs as nvidia-smi does; CUDA's default puts the fastest first"),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "hardware queues a GPU; the engine sets 8"),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        "waits for every kernel; for debugging",
        _when("1", costs="every launch waits for its kernel: a fraction of the speed, and no CUDA graphs"),
        "`unset CUDA_LAUNCH_BLOCKING`",
    ),
    Variable("PYTORCH_CUDA_ALLOC_CONF", "settings of torch's allocator", _segments, "`unset PYTORCH_CUDA_ALLOC_CONF`"),
    Variable("PYTORCH_ALLOC_CONF", "the same, by torch's newer name", _segments, "`unset PYTORCH_ALLOC_CONF`"),
    Variable(
        "NCCL_P2P_LEVEL",
        "how far apart GPUs may be for peer-to-peer: NVL, PIX, PXB, PHB or SYS; SYS crosses sockets",
        _level,
        "a name: `export NCCL_P2P_LEVEL=SYS`",
    ),
    Variable(
        "NCCL_P2P_DISABLE",
        "sends everything through host memory; a test for broken peer-to-peer",
        _when("1", costs="small all-reduces: reported 90 -> 70 tok/s for one user"),
        "`unset NCCL_P2P_DISABLE` when peer-to-peer works",
    ),
    Variable("NCCL_PROTO", "LL for small messages, LL128, Simple for large; all three by default"),
    Variable(
        "NCCL_ALGO",
        "Ring, Tree, NVLS; chosen by size by default",
        _contains("tree", "Tree is reported to be incompatible with CUDA graphs here, and not faster"),
        "`unset NCCL_ALGO`",
    ),
    Variable(
        "NCCL_GRAPH_FILE",
        "an XML that replaces NCCL's own search for rings; for EPYC hosts whose xGMI it underestimates",
        _graph_file,
        "`unset NCCL_GRAPH_FILE`",
    ),
    Variable(
        "NCCL_CUMEM_ENABLE", "memory through CUDA's virtual memory calls; the engine sets 0; iommu=pt hosts need 1"
    ),
    Variable("NCCL_NVLS_ENABLE", "multicast in NVSwitch; the engine sets 0 unless --enable-nccl-nvls"),
    Variable(
        "NCCL_MIN_NCHANNELS", "at least so many channels: more bandwidth for large messages, more GPU time for small"
    ),
    Variable("NCCL_MAX_NCHANNELS", "at most so many channels"),
    Variable("NCCL_BUFFSIZE", "bytes of a channel's buffer; larger ones for prefill through host memory"),
    Variable("NCCL_IB_DISABLE", "no InfiniBand or RoCE: for one host with a network card that NCCL stumbles over"),
    Variable("NCCL_SOCKET_IFNAME", "the network interface for set-up; `lo` on a single host"),
    Variable("NCCL_NET_GDR_LEVEL", "how far a network card may be from a GPU for direct transfers"),
    Variable(
        "NCCL_DEBUG",
        "log level",
        _when("trace", costs="logging in the path of every collective"),
        "`export NCCL_DEBUG=WARN`",
    ),
    Variable("OMP_NUM_THREADS", "threads of CPU operators a process; 8 is usual beside 8 GPUs"),
    Variable(
        "TORCH_CUDA_ARCH_LIST",
        "architectures that extensions are compiled for at the first start; the GPU's own by default",
    ),
    Variable("FLASHINFER_CUDA_ARCH_LIST", "the same for FlashInfer"),
    Variable("CUDA_HOME", "the toolkit whose nvcc compiles at the first start"),
    Variable("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "FlashInfer's all-reduce for GPUs on PCIe, bf16, 2, 4 or 8 GPUs"),
    Variable("SGLANG_PCIE_IPC_MAX_NUMEL", "largest message of it, in elements; larger ones go to NCCL"),
    Variable("SGLANG_SKIP_P2P_CHECK", "believes the driver about peer-to-peer instead of trying it"),
    Variable("SGLANG_SET_CPU_AFFINITY", "binds each rank to cores near its GPU"),
    Variable(
        "SGLANG_SIMULATE_ACC_LEN",
        "invents the accept length, for measurements",
        lambda value: "" if value.strip() in ("", "-1") else "the server's output is not the model's",
        "`unset SGLANG_SIMULATE_ACC_LEN`",
    ),
    Variable("HF_HUB_OFFLINE", "nothing is fetched from the hub: weights must be in its cache"),
    Variable("HF_HOME", "where the hub's cache is"),
)


def findings(system: System, packages: Mapping[str, str], between: Fabric) -> Iterator[Finding]:
    """Yield what there is to say about NCCL and the environment."""
    yield _version(packages, between)
    for variable in VARIABLES:
        value = system.environ.get(variable.name)
        if value is None:
            continue
        costs = variable.wrong(value)
        if costs:
            yield _ENVIRONMENT.warn(f"{variable.name}={value}", variable.does, costs=costs, fix=variable.fix)
        else:
            yield _ENVIRONMENT.ok(f"{variable.name}={value}", variable.does)
    if not any(variable.name in system.environ for variable in VARIABLES):
        yield _ENVIRONMENT.ok("none set", "the engine's and NCCL's defaults; --json lists those that matter")
    if _wants_level(system, between):
        yield _ENVIRONMENT.ok(
            "NCCL_P2P_LEVEL",
            "not set; peer-to-peer is allowed between these GPUs, but NCCL may not use it that far apart by itself",
            fix="`export NCCL_P2P_LEVEL=SYS`, and measure; some hosts hang with it: then PHB",
        )


def _wants_level(system: System, between: Fabric) -> bool:
    far = [pair for pair in between.pairs if pair.path in _LATENCY]
    allowed = bool(far) and all(pair.read == "OK" for pair in far)
    return allowed and not {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"} & set(system.environ)


def _version(packages: Mapping[str, str], between: Fabric) -> Finding:
    name = next((name for name in sorted(packages) if re.fullmatch(r"nvidia-nccl-cu\d+", name)), "")
    if not name:
        return _NCCL.unseen("version", "no nvidia-nccl package in the engine's environment; torch may bring its own")
    version = packages[name]
    if between.multi and version.startswith("2.30.4"):
        return _NCCL.warn(
            "version",
            f"{name} {version}",
            costs="reported to hang at the first all-reduce on hosts whose GPUs are PHB apart (nccl#1999)",
            fix="`NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0` tells whether it is that; 2.30.7 comes with the locked set",
        )
    return _NCCL.ok("version", f"{name} {version}")
