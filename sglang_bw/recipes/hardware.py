"""The machine that a recipe is for, and what is different on another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from sglang_bw.recipes.values import Args, Env, Part

Device = Literal["cpu", "cuda"]
Arch = Literal["sm80", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"]
Fabric = Literal["pcie", "nvlink"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


Archs = Annotated[tuple[Arch, ...], BeforeValidator(_listed)]
Fabrics = Annotated[tuple[Fabric, ...], BeforeValidator(_listed)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], BeforeValidator(_listed)]
Boards = Annotated[tuple[str, ...], BeforeValidator(_listed)]


@dataclass(frozen=True)
class Hardware:
    """A machine. What is not known is empty, and no condition on it holds.

    :ivar board: its name, ``RTX 5090``.
    :ivar count: GPUs of the launch.
    """

    device: Device = "cuda"
    arch: str = ""
    board: str = ""
    fabric: str = ""
    count: int = 0


class Target(Part):
    """The machines that the recipe was written for. An empty key means any."""

    arch: Archs = ()
    fabric: Fabrics = ()
    gpus: Counts = ()
    board: Boards = ()

    def misfits(self, hardware: Hardware) -> list[str]:
        """Return in what a known machine differs, as sentences."""
        wanted: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("architecture", hardware.arch, self.arch),
            ("fabric", hardware.fabric, self.fabric),
            ("number of GPUs", hardware.count, self.gpus),
        ]
        return [
            f"its {name} is {' or '.join(map(str, allowed))}, here it is {there}"
            for name, there, allowed in wanted
            if there and allowed and there not in allowed
        ]


class When(Part):
    """On which machines an override counts: all conditions must hold."""

    device: Device | None = None
    arch: Archs = ()
    board: Boards = ()
    fabric: Fabrics = ()
    gpus: Counts = ()

    @model_validator(mode="after")
    def _some_condition(self) -> When:
        if not self.model_fields_set:
            raise ValueError(f"needs a condition: {', '.join(When.model_fields)}")
        return self

    def holds(self, hardware: Hardware) -> bool:
        """Tell whether a machine is meant."""
        there = {
            "device": hardware.device,
            "arch": hardware.arch,
            "board": hardware.board,
            "fabric": hardware.fabric,
            "gpus": hardware.count,
        }
        return all(there[name] in _listed(getattr(self, name)) for name in self.model_fields_set)


class Graphs(Part):
    """Batch sizes for which CUDA graphs are captured."""

    decode_max_bs: int | None = Field(default=None, ge=1, description="The largest one.")
    decode_bs: tuple[int, ...] = Field(default=(), description="All of them, in place of the engine's own list.")


class Memory(Part):
    """How the memory of a GPU is shared out."""

    fraction: float | None = Field(
        default=None, gt=0, lt=1, description="For weights and KV pool; the engine chooses when it is not given."
    )
    kv_dtype: str | None = Field(default=None, description="auto, bf16, fp8_e4m3.")
    weights_gib: float | None = Field(default=None, gt=0, description="Measured weights of the target a GPU, in GiB.")
    draft_gib: float | None = Field(default=None, gt=0, description="Measured weights of the draft a GPU, in GiB.")


class Override(Part):
    """What is different on some machines; ``null`` takes away what the recipe sets for all."""

    when: When
    args: Args = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    graphs: Graphs = Field(default_factory=Graphs)
    memory: Memory = Field(default_factory=Memory)
    spec: dict[Literal["steps", "topk", "draft_tokens", "args"], Any] = Field(
        default_factory=dict, description="Keys of spec that differ."
    )
