"""The engine that `serve` would start: which one, whether it is the patched one, and whether the recipe is for it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.errors import NotInstalledError, OtherEngineError
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.verify import Installation, State, inspect, inspect_environment
from sglang_bw.recipes.schema import Recipe

_KERNEL_PACKAGES = ("sglang-kernel", "sgl-kernel")


@dataclass(frozen=True)
class Engine:
    """An engine in an environment.

    :ivar python: the interpreter that runs it.
    :ivar tree: an unpacked engine to use in place of the installed one.
    :ivar has_gpu_kernels: whether the environment has the package with the engine's CUDA kernels.
    :ivar probed: the environment that the interpreter belongs to.
    """

    python: Path
    tree: Path | None
    installation: Installation
    has_gpu_kernels: bool
    probed: Environment

    def check(self, recipe: Recipe, *, allow_stock: bool = False, force: bool = False) -> str:
        """Make sure that this is the patched engine, intact, and one that the recipe was written for.

        :param allow_stock: go on with an engine that is stock or edited.
        :param force: go on with a recipe that is for other versions.
        :return: what was let through, or an empty string.
        :raises NotInstalledError: there is none.
        :raises StockEngineError: it is upstream's.
        :raises EditedEngineError: its files are not what was built, or another package shadows them.
        :raises OtherEngineError: the recipe is for other versions.
        """
        problem = self.installation.error()
        if problem and (self.installation.state is State.ABSENT or not allow_stock):
            if not isinstance(problem, NotInstalledError):
                problem.hint += "; --allow-stock starts it as it is"
            raise problem
        if not recipe.engine.accepts(self.installation.version):
            version, wanted = self.installation.version, recipe.engine.sglang
            told = f"the recipe {recipe.id} is for sglang {wanted}, but the engine is {version}"
            if not force:
                hint = f"`{self.installation.cure}` installs the newest; or copy the recipe and change engine.sglang"
                raise OtherEngineError(told, hint=f"{hint}; --force goes on all the same.")
            return f"{problem.message}; {told}" if problem else told
        return str(problem.message) if problem else ""

    def environment(self) -> dict[str, str]:
        """Return the environment for the engine, before anything that a launch adds.

        The environment's own programs come first: kernels are compiled with the `ninja` that is installed there.
        """
        environ = dict(os.environ)
        own = str(self.probed.executable.parent)
        search = environ.get("PATH", os.defpath)
        if own not in search.split(os.pathsep):
            environ["PATH"] = os.pathsep.join([own, search])
        if self.tree:
            rest = environ.get("PYTHONPATH")
            environ["PYTHONPATH"] = os.pathsep.join([str(self.tree), *([rest] if rest else [])])
        return environ


def find(python: Path | None = None, tree: Path | None = None) -> Engine:
    """Look at the engine of an environment, this one by default.

    :param python: the environment's interpreter.
    :param tree: a folder with ``sglang/`` and its ``.dist-info``, used in place of what is installed.
    :raises RefusedError: there is no such interpreter.
    """
    environment = Environment.probe(python)
    # The launch runs `python -P`, see Command.argv.
    installation = inspect(python, tree=tree) if tree else inspect_environment(environment, safe_path=True)
    return Engine(
        python=python or Path(sys.executable),
        tree=tree.resolve() if tree else None,
        installation=installation,
        has_gpu_kernels=any(name in environment.installed for name in _KERNEL_PACKAGES),
        probed=environment,
    )
