"""What a killed install leaves in an environment, and no installer removes."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from sglang_bw.fork.environment import Environment, dist_infos, name_and_version
from sglang_bw.fork.record import RECORD_PATH, BwRecord
from sglang_bw.fork.verify import PACKAGE


def set_aside(environment: Environment) -> Iterator[Path]:
    """Yield what pip has put aside of the engine, to delete it or to put it back."""
    yield from environment.purelib.glob(f"~{PACKAGE[1:]}*")


def clear_half_distributions(environment: Environment, names: set[str]) -> None:
    """Remove half distributions, which installers can neither use nor replace.

    Those are ``.dist-info`` folders without RECORD, and the ``~glang`` folders where pip keeps what it is about to
    delete. Files of the packages themselves stay: the install that follows writes over them.
    """
    for info in environment.broken():
        if name_and_version(info)[0] in names:
            shutil.rmtree(info)
    for left in set_aside(environment):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def clear_half_engine(environment: Environment, ours: Collection[str]) -> None:
    """Remove what a half patched engine would leave in the one that follows: by name, as an uninstall does.

    The rest is upstream's, which is written over, or the user's own (tuned kernel configurations).
    """
    whole = {name_and_version(info)[0] for info in dist_infos(environment.sys_path) if (info / "RECORD").is_file()}
    record = environment.purelib / RECORD_PATH
    if PACKAGE in whole or not record.parent.is_dir():
        return
    local: Collection[str] = ()
    with suppress(OSError, ValidationError):  # cut off, or not written yet
        local = BwRecord.model_validate_json(record.read_bytes()).files
    package = record.parent.resolve()
    for path in {RECORD_PATH, *ours, *local}:
        file = environment.purelib / path
        if file.parent.resolve().is_relative_to(package):
            file.unlink(missing_ok=True)
