"""What makes two launches the same launch: engine, flags, environment and weights, down to one digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from sglang_bw.recipes.flags import Flag, Flags

# Where it listens and what it is called: none of it decides whether a start succeeds.
_IRRELEVANT = {
    "host", "port", "dist-init-addr", "api-key", "admin-api-key", "served-model-name", "decode-log-interval",
    "log-level", "log-level-http", "log-requests", "log-requests-level",
}  # fmt: skip
_WEIGHT_FLAGS = ("model-path", "speculative-draft-model-path")


def digest(engine: str, flags: Flags, env: Mapping[str, str]) -> str:
    """Return the digest of a launch: equal for launches that cannot differ in how they start.

    The order of flags and their other names do not count; the port, keys and log levels do not either. Weights in a
    local directory count by the names, sizes and times of their files, so that a repaired download is another launch.

    :param engine: version and tree of the engine, or whatever tells two engines apart.
    :param env: variables that the launch adds to the user's environment.
    """
    last = {flag.key: flag for flag in flags if flag.key not in _IRRELEVANT}
    parts = {
        "engine": engine,
        "flags": sorted([key, *_values(flag)] for key, flag in last.items()),
        "env": sorted(env.items()),
        "weights": [_weights(last[name].values) for name in _WEIGHT_FLAGS if name in last],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _values(flag: Flag) -> Iterable[str]:
    # A switch and its opposite have one key.
    return flag.values or (str(not flag.name.startswith("no-")),)


def _weights(values: tuple[str, ...]) -> list[tuple[str, int, int]]:
    folder = Path(values[-1]) if values else None
    if folder is None or not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            about = path.stat()
            found.append((path.name, about.st_size, about.st_mtime_ns))
    return found
