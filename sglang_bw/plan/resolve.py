"""What the engine makes of a command line on a machine that need not be there.

The engine's own argument resolution runs in a child process of its own interpreter, told that it is the recipe's
architecture and memory; every value that it changes is attributed to the step that changed it. Answers are cached by
the engine's files, the arguments, the model's configuration and the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

import sglang_bw
from sglang_bw.errors import NotInstalledError, ResolverError
from sglang_bw.fork.environment import clean_environ
from sglang_bw.host.arch import capability
from sglang_bw.plan.resolution import Resolution, of_answer

if TYPE_CHECKING:
    from sglang_bw.host.boards import Board

TIMEOUT_S = 120.0
_PROBE_VERSION = 3  # part of the cache key: answers of another probe are not read
# The tool's package under its own name, and nothing else of the tool's environment on the import path.
_START = """
import sys, types
package = types.ModuleType("sglang_bw")
package.__path__ = [sys.argv[1]]
sys.modules["sglang_bw"] = package
from sglang_bw.plan.engine_probe.main import main
main()
"""
_MODEL_FLAGS = ("--model-path", "--speculative-draft-model-path")
_LEFT_OUT = ("--revision", "--speculative-draft-model-revision")
_CONFIG_FILES = ("config.json", "generation_config.json", "hf_quant_config.json", "params.json")
_FOREIGN_ENV = ("SGLANG_USE_CPU_ENGINE",)


class EngineTooOldError(Exception):
    """The engine is from before the releases whose resolution can be run as another machine (0.5.19)."""


@dataclass(frozen=True)
class EngineFiles:
    """Where the engine is.

    :ivar python: the interpreter that runs it.
    :ivar location: the folder that holds ``sglang/``.
    :ivar tree: the same, when it is an unpacked engine in place of the installed one.
    """

    python: Path
    location: Path
    version: str
    tree: Path | None = None

    def digest(self) -> str:
        """Return a digest of names, sizes and times of the engine's Python files: it changes with every edit."""
        digest = hashlib.sha256()
        for folder, folders, names in os.walk(self.location / "sglang"):
            folders.sort()
            for name in sorted(names):
                if name.endswith((".py", ".json")):
                    facts = (Path(folder) / name).stat()
                    digest.update(f"{folder}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def resolve(
    argv: Sequence[str],
    board: Board,
    count: int,
    configs: Mapping[str, Path],
    engine: EngineFiles,
    *,
    env: Mapping[str, str] | None = None,
    only_cached: bool = False,
    tell: Callable[[str], None] = lambda _line: None,
) -> Resolution | None:
    """Resolve a command line as ``count`` boards; no GPU, no weights and no network are used.

    :param argv: engine flags as tokens; ``--model-path`` and the draft's path may be hub ids.
    :param configs: hub id or path among ``argv`` -> folder with that model's ``config.json``.
    :param env: the launch's environment variables; many of the engine's rules read some. What this shell has
        of those (:func:`is_of_the_engine`) counts only where it is among them: the machine may be another.
    :param only_cached: do not ask the engine; the answer is ``None`` when it has not been asked before.
    :param tell: is called with a line when the engine must be asked.
    :raises EngineTooOldError: the engine cannot be resolved as another machine.
    :raises NotInstalledError: there is no engine, or its dependencies are missing.
    :raises ResolverError: the child ended without an answer, or not in time.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-bw-") as folder:
        staged = {name: _stage(path, Path(folder) / str(index)) for index, (name, path) in enumerate(configs.items())}
        request = {
            "argv": _child_argv(argv, staged),
            "capability": capability(board.arch),
            "memory_mib": board.memory_mib,
            "count": count,
            "name": f"NVIDIA {board.name}",
        }
        key = _key(request, staged, engine, env or {})
        cached = _cached(key)
        if cached is None and only_cached:
            return None
        if cached is None:
            tell(f"asking sglang {engine.version} what it would do on {count}x {board.name}")
            cached = _ask(request, engine, env or {})
            names = {str(path): name for name, path in staged.items()}
            cached = _renamed(cached, names)
            _keep(key, cached)
            return of_answer(cached, fresh=True)
    return of_answer(cached, fresh=False)


def is_of_the_engine(name: str) -> bool:
    """Tell whether a variable is one that the engine's rules may read; ours begin in the same way."""
    return name.startswith(("SGLANG_", "NCCL_")) and not name.startswith("SGLANG_BW_")


def _stage(source: Path, target: Path) -> Path:
    """Copy a model's configuration, without what would run code of the model's own."""
    target.mkdir()
    for name in _CONFIG_FILES:
        if (source / name).is_file():
            text = (source / name).read_text(encoding="utf-8")
            if name == "config.json":
                config = json.loads(text)
                config.pop("auto_map", None)
                text = json.dumps(config)
            (target / name).write_text(text, encoding="utf-8")
    return target


def _child_argv(argv: Sequence[str], staged: Mapping[str, Path]) -> list[str]:
    tokens = iter(argv)
    result: list[str] = []
    for token in tokens:
        if token in _LEFT_OUT:
            next(tokens, None)
        elif token in _MODEL_FLAGS:
            name = next(tokens, "")
            result += [token, str(staged.get(name, name))]
        else:
            result.append(token)
    return result


def _ask(request: dict[str, Any], engine: EngineFiles, env: Mapping[str, str]) -> dict[str, Any]:
    package = str(Path(sglang_bw.__file__).parent)
    command = [str(engine.python), "-P", "-W", "ignore", "-c", _START, package]
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request),
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(engine, env),
                timeout=TIMEOUT_S,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ResolverError(
                f"the engine's argument resolution did not end within {TIMEOUT_S:.0f} s",
                hint="The machine may be overloaded; --no-resolve plans without it.",
            ) from None
        except OSError as error:
            raise ResolverError(f"cannot run {engine.python}: {error.strerror}", hint="Check --python.") from error
        log.seek(0)
        return _answer(done.stdout, done.returncode, log.read(), engine)


def _answer(text: str, code: int, log: str, engine: EngineFiles) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        last = lines[-1] if lines else f"it ended with exit code {code} without a word"
        if last.startswith("ModuleNotFoundError") and "sglang" in last:
            raise NotInstalledError("the environment has no sglang", hint="`sglang-bw install`.") from None
        raise ResolverError(
            f"the argument resolution of sglang {engine.version} failed: {last[:400]}",
            hint="`sglang-bw verify` tells whether the engine is intact; --no-resolve plans without it.",
        ) from None
    if answer["outcome"] == "too old":
        raise EngineTooOldError(answer["error"])
    return answer


def _environment(engine: EngineFiles, env: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in clean_environ().items() if not is_of_the_engine(name)}
    environ = inherited | {**env, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for name in _FOREIGN_ENV:
        environ.pop(name, None)
    if engine.tree:
        environ["PYTHONPATH"] = os.fspath(engine.tree.resolve())
    return environ


def _renamed(answer: Any, names: Mapping[str, str]) -> Any:
    """Put the user's names back in place of the staged folders."""
    text = json.dumps(answer)
    for path, name in names.items():
        text = text.replace(json.dumps(path)[1:-1], json.dumps(name)[1:-1])
    return json.loads(text)


def _key(request: dict[str, Any], staged: Mapping[str, Path], engine: EngineFiles, env: Mapping[str, str]) -> str:
    relevant = {name: value for name, value in env.items() if is_of_the_engine(name)}
    files = {
        name: {file.name: file.read_text(encoding="utf-8") for file in sorted(path.iterdir())}
        for name, path in staged.items()
    }
    shown = {str(path): name for name, path in staged.items()}
    argv = [shown.get(token, token) for token in request["argv"]]
    asked = {**request, "argv": argv}
    facts = [_PROBE_VERSION, asked, files, engine.version, engine.digest(), sorted(relevant.items())]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _folder() -> Path:
    return Path(platformdirs.user_cache_dir("sglang-bw")) / "resolved"


def _cached(key: str) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads((_folder() / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if "outcome" in answer else None


def _keep(key: str, answer: dict[str, Any]) -> None:
    """Write the answer in one step; a cache that cannot be written is no error."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_folder(), delete=False, encoding="utf-8") as file:
            json.dump(answer, file)
        Path(file.name).replace(_folder() / f"{key}.json")
    except OSError:
        return
