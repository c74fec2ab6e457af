"""Commits whose code this user trusts: recorded once with consent, used by every later start.

One small file a model in the user's state directory, mode 0600. A file that is deleted is a pin that is forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_bw.errors import OutputError, UnsafeLaunchError

DEFAULT_REF = "main"


class Pin(BaseModel):
    """What is trusted of one model.

    :ivar model: id on the hub, or the absolute path of a directory.
    :ivar ref: the branch or tag that the launch names; the pin counts for that name alone. Empty for a directory.
    :ivar commit: whole hash of the hub's commit; ``sha256:`` and the digest of a directory's code.
    :ivar at: when the user consented.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    model: str
    ref: str = DEFAULT_REF
    commit: str = Field(pattern=r"^([0-9a-f]{40}|sha256:[0-9a-f]{64})$")
    at: datetime

    @property
    def date(self) -> str:
        """The day, as people write it."""
        return self.at.date().isoformat()


def root() -> Path:
    """Return the folder of all."""
    return platformdirs.user_state_path("sglang-bw") / "pins"


def place(model: str, ref: str) -> Path:
    """Return the file of a model's pin."""
    if ref and len(name := quote(f"{model}@{ref}", safe="@").replace("%2F", "--")) <= 200:
        return root() / f"{name}.json"
    digest = hashlib.sha256(f"{model}@{ref}".encode(errors="surrogateescape")).hexdigest()
    return root() / f"{quote(Path(model).name, safe='')[:60]}-{digest[:24]}.json"


def find(model: str, ref: str = DEFAULT_REF) -> Pin | None:
    """Return what is recorded of a model; ``None`` when nothing is.

    :raises UnsafeLaunchError: a record is there and cannot be read, so that nobody knows what was trusted.
    """
    path = place(model, ref)
    try:
        pin = Pin.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise _unreadable(model, path, what or "") from error
    if (pin.model, pin.ref) != (model, ref):
        raise _unreadable(model, path, f"it is of {pin.model} at {pin.ref}")
    return pin


def of(model: str) -> list[Pin]:
    """Return the records of a model, one for each branch; damaged ones are left out."""
    found = []
    for path in sorted(root().glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):
            found.append(Pin.model_validate_json(path.read_bytes()))
    return [pin for pin in found if pin.model == model]


def record(model: str, ref: str, commit: str) -> Pin:
    """Record a commit in place of the one before; readers see the old record or the new one, whole.

    :raises OutputError: it cannot be written.
    """
    pin = Pin(model=model, ref=ref, commit=commit, at=datetime.now(UTC).replace(microsecond=0))
    path = place(model, ref)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(pin.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise OutputError(f"the pin of {model} cannot be written to {path}: {error.strerror}") from error
    return pin


def _unreadable(model: str, path: Path, what: str) -> UnsafeLaunchError:
    return UnsafeLaunchError(
        f"it is not known which commit of {model} is trusted: {path}: {what}",
        hint="Delete that file, then `serve --pin` records the commit anew.",
    )
