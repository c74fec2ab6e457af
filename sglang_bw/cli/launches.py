"""From a recipe's name to the launch that it means on this machine, without starting anything."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_bw.cli import planning
from sglang_bw.errors import NotInstalledError
from sglang_bw.fork.series import Series, newest_base, patches_root
from sglang_bw.host import fingerprint, nvml
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import selection
from sglang_bw.ledger import reference
from sglang_bw.recipes.hardware import Device


@dataclass(frozen=True)
class Described:
    """A launch on this machine.

    :ivar host: fingerprint of the machine.
    :ivar reference: as the rows of others are held against it.
    """

    recipe: str
    host: str
    reference: reference.Launch


def described(name: str) -> Described:
    """Describe the launch that ``serve NAME`` would be.

    :raises UnknownRecipeError: no such recipe or model.
    """
    recipe = selection.select(name)
    here = nvml.read(nvml.load())
    device: Device = "cuda" if devices.gpu_count() else "cpu"
    version = ""
    try:
        engine = engines.find()
        device = devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels)
        version = engine.installation.version
    except NotInstalledError:
        pass
    root = patches_root()
    version = version or Series.load(root, newest_base(root)).pins.full_version
    machine = planning.machine(recipe, "cuda" if here.boards or recipe.hardware.board else device, here)
    command = commands.build(recipe, machine, {}, version=version)
    names = (command.target, command.draft or "", recipe.id, recipe.title)
    return Described(
        recipe=recipe.id,
        host=fingerprint.look().fingerprint,
        reference=reference.Launch(models=names, flags=command.flags, env=command.env, arch=machine.arch or None),
    )
