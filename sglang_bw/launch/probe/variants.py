"""The all-reduces that are compared: a way of the engine, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_bw.errors import ProbeError

# What the engine sets for NCCL when nobody else does; with symmetric memory it is the other way round, whoever does.
_PLAIN = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
_SYMMETRIC = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}
# Else the communicator asks a server's configuration how large a buffer one model family wants; there is no server.
_TORCH_SYMMETRIC = {"SGLANG_OPT_USE_INKLING_CUSTOM_AR": "0"}
# Names rather than numbers: the numbers' meaning has changed between NCCL releases.
_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")


@dataclass(frozen=True)
class Variant:
    """One line of the comparison.

    :ivar name: ``nccl`` is what the engine does by itself; a plan looks for that name.
    :ivar way: of ``ranks.communicators``.
    :ivar env: variables of its processes, whatever the launch sets.
    :ivar defaults: variables that the engine sets where the launch does not.
    """

    name: str
    way: str
    env: Mapping[str, str] = field(default_factory=dict)
    says: str = ""
    defaults: Mapping[str, str] = field(default_factory=lambda: _PLAIN)

    def environ(self, launch: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of its processes, from that of the launch."""
        return {**self.defaults, **launch, **self.env}

    def shown(self, launch: Mapping[str, str]) -> dict[str, str]:
        """Return what of it decides about all-reduces: every variable of NCCL, whoever set it, and its own."""
        whole = self.environ(launch)
        return {name: whole[name] for name in sorted(whole) if name.startswith("NCCL_") or name in self.env}


CUDA: tuple[Variant, ...] = (
    Variant("nccl", "nccl", {}, "NCCL's own choice of protocol and path"),
    Variant("nccl-ll", "nccl", {"NCCL_PROTO": "LL"}, "NCCL_PROTO=LL"),
    Variant("nccl-ll128", "nccl", {"NCCL_PROTO": "LL128"}, "NCCL_PROTO=LL128"),
    Variant("nccl-simple", "nccl", {"NCCL_PROTO": "Simple"}, "NCCL_PROTO=Simple"),
    *(
        Variant(f"nccl-p2p-{level.lower()}", "nccl", {"NCCL_P2P_LEVEL": level}, f"NCCL_P2P_LEVEL={level}")
        for level in _LEVELS
    ),
    Variant("custom", "custom", {}, "the engine's custom all-reduce"),
    Variant("pcie-ipc", "pcie-ipc", {}, "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1"),
    Variant("nccl-symm-mem", "nccl-symm-mem", _SYMMETRIC, "--enable-symm-mem"),
    Variant("torch-symm-mem", "torch-symm-mem", _TORCH_SYMMETRIC, "--enable-torch-symm-mem"),
    Variant(
        "torch-symm-mem-two-shot",
        "torch-symm-mem",
        {**_TORCH_SYMMETRIC, "SGLANG_TORCH_SYMM_MEM_TWO_SHOT_WITHOUT_MULTICAST": "1"},
        "--enable-torch-symm-mem without multicast; can hang over PCIe",
    ),
)
CPU: tuple[Variant, ...] = (Variant("gloo", "torch", {}, "gloo, as the engine's CPU groups", defaults={}),)


def choose(device: str, names: Sequence[str]) -> tuple[Variant, ...]:
    """Return the variants of a device, or those of them that were named.

    :raises ProbeError: there is no such variant.
    """
    known = CPU if device == "cpu" else CUDA
    for name in names:
        if name not in {variant.name for variant in known}:
            raise ProbeError(
                f"no all-reduce here is called {name!r}",
                hint=f"on {device}: {', '.join(variant.name for variant in known)}.",
            )
    return tuple(variant for variant in known if not names or variant.name in names)
