"""Models on the hub: what of them is in its cache already, what must be fetched, and fetching it with progress.

The engine would fetch by itself, but behind a log file, file by file, and would find out at the end that the disk is
too small. The hub's own library does the work, in a process of its own, so that an interrupt ends it at once; what has
been fetched stays in the cache and is not fetched again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sglang_bw.errors import BwError, FetchError, ModelFilesError
from sglang_bw.host.gpus import GIB
from sglang_bw.launch import weights
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags

TIMEOUT_S = 8.0
POLL_S = 0.3
# Kept free beside the weights: logs, compiled kernels, the engine's temporary files.
SPARE_BYTES = 2 * GIB
_OTHER_FORMATS = {".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".ot", ".tflite"}
_NOT_NEEDED = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".mp4", ".pdf"}
_LOGIN = "For a gated model accept its terms on the hub, then `hf auth login`."
_UNREACHED = "the hub cannot be reached"
_TRUE = ("1", "on", "yes", "true")
# Names and short hashes can be given to other commits; a whole hash cannot.
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Wanted:
    """A model that a launch takes from the hub.

    :ivar role: ``target`` or ``draft``.
    :ivar cache: the hub's cache folder.
    """

    role: str
    name: str
    revision: str | None
    cache: Path


@dataclass(frozen=True)
class Remote:
    """What the hub has of a model, and how much of that is not in the cache.

    :ivar commit: hash of the revision.
    :ivar missing: file name to bytes; none of those that are there, and which the library only has to link.
    :ivar total: bytes of all files that the engine needs.
    :ivar problem: why the hub could not be asked.
    """

    wanted: Wanted
    commit: str = ""
    missing: Mapping[str, int] | None = None
    total: int = 0
    problem: str = ""

    @property
    def missing_bytes(self) -> int:
        """Bytes that must be fetched."""
        return sum((self.missing or {}).values())


def wanted(command: Command, environ: Mapping[str, str]) -> Iterator[Wanted]:
    """Yield the models of a launch that are neither local nor made up, and that the hub serves."""
    if is_modelscope(environ):
        return
    cache = cache_of(command, environ)
    target_format = flags.value(command.flags, "load-format") or "auto"
    draft_format = flags.value(command.flags, "speculative-draft-load-format") or target_format
    # Of other formats the engine knows best which files it reads.
    if target_format in ("auto", "safetensors") and not weights.local(command.target):
        yield Wanted("target", command.target, flags.value(command.flags, "revision"), cache)
    if command.draft and draft_format in ("auto", "safetensors") and not weights.local(command.draft):
        yield Wanted("draft", command.draft, flags.value(command.flags, "speculative-draft-model-revision"), cache)


def cache_of(command: Command, environ: Mapping[str, str]) -> Path:
    """Return the hub's cache folder as the engine of a launch will take it."""
    return Path(flags.value(command.flags, "download-dir") or _cache(environ)).expanduser()


def is_modelscope(environ: Mapping[str, str]) -> bool:
    """Tell whether the engine asks another hub, of which nothing is known here."""
    return environ.get("SGLANG_USE_MODELSCOPE", "").lower() in _TRUE


def _cache(environ: Mapping[str, str]) -> Path:
    if explicit := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(explicit)
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home) / "hub"


def is_offline(environ: Mapping[str, str]) -> bool:
    """Tell whether the user wants nothing from the hub."""
    return any(environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def cached(model: Wanted, commit: str | None = None) -> Path | None:
    """Return the folder of a model in the cache, whole or not; ``None`` when there is nothing of it."""
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "params.json"):
        found = try_to_load_from_cache(model.name, file, cache_dir=model.cache, revision=commit or model.revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def noted(model: Wanted) -> str:
    """Return the commit that the cache notes for a branch or tag, by default main; empty when it notes none."""
    try:
        text = (_folder(model) / "refs" / (model.revision or "main")).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if COMMIT.fullmatch(text) else ""


def head(model: Wanted, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    """Ask the hub for the commit that a branch or tag is at now.

    :return: the commit, and an empty string; or an empty string, and why there is none.
    """
    info, problem = _info(model, environ, timeout_s, files=False)
    commit = (info.sha if info else None) or ""
    if not problem and not COMMIT.fullmatch(commit):
        return "", f"the hub answers no commit: {commit[:60]!r}"
    return commit, problem


def look(model: Wanted, environ: Mapping[str, str]) -> Remote:
    """Ask the hub what a model consists of; one request, nothing is fetched."""
    info, problem = _info(model, environ, TIMEOUT_S, files=True)
    if info is None:
        return Remote(model, problem=problem)
    files = {file.rfilename: file.size or 0 for file in _needed(info.siblings or [])}
    hashes = {file.rfilename: (file.lfs.sha256 if file.lfs else file.blob_id) for file in info.siblings or []}
    commit = info.sha or ""
    missing = {
        name: 0 if _has_bytes(model, hashes[name]) else size
        for name, size in files.items()
        if not _is_linked(model, commit, name)
    }
    return Remote(model, commit, missing, sum(files.values()))


def _info(model: Wanted, environ: Mapping[str, str], timeout_s: float, *, files: bool) -> tuple[Any, str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        api = HfApi(endpoint=environ.get("HF_ENDPOINT") or None)
        return api.model_info(model.name, revision=model.revision, files_metadata=files, timeout=timeout_s), ""
    except HfHubHTTPError as error:
        return None, _refusal(model, error)
    except HFValidationError as error:
        return None, f"{model.name!r} is no model id: {error}"
    except Exception as error:  # httpx's or requests', by the library's release
        return None, f"{_UNREACHED}: {type(error).__name__}: {error}"


def _refusal(model: Wanted, error: Any) -> str:
    status = error.response.status_code if error.response is not None else 0
    if status in (401, 403, 404):
        what = f"revision {model.revision} of {model.name}" if model.revision else model.name
        return f"the hub does not give {what} to you ({status}): no such model, private, or gated"
    return f"the hub answers {status}"


def _needed(files: list[Any]) -> Iterator[Any]:
    """Yield the files that the engine reads: safetensors where there are any, and everything small beside them."""
    names = [PurePosixPath(file.rfilename) for file in files]
    safe = any(name.suffix == ".safetensors" and len(name.parts) == 1 for name in names)
    sharded = any(name.name.startswith("model") and name.suffix == ".safetensors" for name in names)
    for file, name in zip(files, names, strict=True):
        is_other = safe and name.suffix in _OTHER_FORMATS
        is_copy = name.parts[0] == "original" or (sharded and name.name.startswith("consolidated"))
        if not (is_other or is_copy or name.suffix in _NOT_NEEDED or name.name == ".gitattributes"):
            yield file


def _is_linked(model: Wanted, commit: str, name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model.name, name, cache_dir=model.cache, revision=commit), str)


def _has_bytes(model: Wanted, digest: str | None) -> bool:
    """Tell whether the bytes are there, for another commit or from a fetch that was ended before it linked them."""
    return bool(digest) and (_folder(model) / "blobs" / str(digest)).is_file()


def _folder(model: Wanted) -> Path:
    return model.cache / f"models--{model.name.replace('/', '--')}"


def problem(remote: Remote, *, beside: int = 0) -> BwError | None:
    """Return why a model cannot be had, or ``None``: the hub refuses, or the disk is too small.

    :param beside: bytes of other models that will be fetched to the same disk before it.
    """
    model = remote.wanted
    if remote.problem:
        return FetchError(
            f"the {model.role} {model.name} is not in {model.cache} as a whole, and {remote.problem}",
            hint=("" if _UNREACHED in remote.problem else f"{_LOGIN} ")
            + "A mirror: HF_ENDPOINT; or files that are here: --model-path DIR, --draft DIR.",
        )
    there = next(path for path in (model.cache, *model.cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    needed = remote.missing_bytes + (SPARE_BYTES if remote.missing_bytes else 0)
    if needed + beside > free + _begun(model):
        return FetchError(
            f"the {model.role} {model.name}: {remote.missing_bytes / 1e9:,.1f} GB are to be fetched into {model.cache},"
            f" {free / 1e9:,.1f} GB are free there",
            hint="free some, `hf cache ls` shows what is cached; or another disk: HF_HUB_CACHE=DIR.",
        )
    return None


def offline_problem(model: Wanted) -> BwError | None:
    """Return what is missing of a model when nothing may be fetched, or ``None``."""
    folder = cached(model)
    if folder is None:
        return ModelFilesError(
            f"the {model.role} {model.name} is not in {model.cache}, and HF_HUB_OFFLINE is set",
            hint="`unset HF_HUB_OFFLINE` to fetch it, or name a directory: --model-path DIR, --draft DIR.",
        )
    try:
        weights.check(folder, model.role, tokenizer=folder if model.role == "target" else None)
    except ModelFilesError as error:
        return error
    return None


def _begun(model: Wanted) -> int:
    """Return the bytes of files that an earlier run left unfinished; the library goes on from there."""
    try:
        return sum(path.stat().st_blocks * 512 for path in (_folder(model) / "blobs").glob("*.incomplete"))
    except OSError:
        return 0


def fetch(remote: Remote, environ: Mapping[str, str], tell: Callable[[int], None]) -> None:
    """Fetch what is missing.

    :param tell: called several times a second with the bytes of this model that have come so far.
    :raises FetchError: it did not come.
    """
    model = remote.wanted
    arguments = [model.name, model.revision or "main", str(model.cache), *(remote.missing or {})]
    before = _size(model)
    with _fetching(arguments, environ) as child:
        while child.poll() is None:
            tell(max(0, _size(model) - before))
            time.sleep(POLL_S)
        said = (child.stderr.read() if child.stderr else "").strip().splitlines()
    if child.returncode:
        why = said[-1][:300] if said else f"exit code {child.returncode}"
        raise FetchError(
            f"the {model.role} {model.name} did not come: {why}",
            hint=_LOGIN if "Gated" in why or "401" in why else "the same command goes on where it stopped.",
        )
    tell(remote.missing_bytes)


@contextmanager
def _fetching(arguments: list[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "sglang_bw.launch.fetch", str(os.getpid()), *arguments]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}, process_group=0,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _size(model: Wanted) -> int:
    # Blocks, not lengths: a file may be given its length before its bytes are there.
    try:
        return sum(path.stat().st_blocks * 512 for path in (_folder(model) / "blobs").iterdir())
    except OSError:
        return 0
