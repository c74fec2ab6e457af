"""What must not be seen: which engine flags are secret, where the API key comes from, and how it reaches the engine.

A command line is public on its machine (``ps``), and an environment is inherited by everything that the engine
starts. So keys go to the engine in a file of SGLang's own ``--config`` format, mode 0600 in a folder of mode 0700, that
is gone when the engine is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import yaml

from sglang_bw.errors import ApiKeyError, OutputError
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flag, Flags

VARIABLE = "SGLANG_BW_API_KEY"
NAMES = ("api-key", "admin-api-key", "ssl-keyfile-password")
# An option of its own that begins like a secret one.
_PUBLIC = "ssl-keyfile"
# It puts what the file says before the command line, as words.
_DASH = "begins with a dash, which the engine would take for a flag"
CONFIG = "engine.yaml"
REDACT = "redact.json"  # read by the keeper
STARS = "***"
_VARIABLE = re.compile(r"TOKEN$|SECRET|PASSWORD|API_KEY")
_USERINFO = re.compile(r"(?<=://)[^\s/?#]*@")


def is_secret(flag: Flag) -> bool:
    """Tell whether a flag sets a secret; the engine's parser takes abbreviations too."""
    named = len(flag.name) > 1 and any(name.startswith(flag.name) for name in NAMES)
    return flag.dashes == "--" and named and flag.name != _PUBLIC and bool(flag.values)


def is_secret_variable(name: str) -> bool:
    """Tell whether the value of a variable must not be shown."""
    return bool(_VARIABLE.search(name))


def shown(flag: Flag) -> Flag:
    """Return a flag as a log or a record may have it."""
    return Flag(flag.name, (STARS,)) if is_secret(flag) else flag


def shown_variable(name: str, value: str) -> str:
    """Return the value of a variable as a log or a record may have it."""
    return STARS if is_secret_variable(name) else value


def without_userinfo(text: str) -> str:
    """Return an address, or a text that quotes some, without the user and password before the host."""
    return _USERINFO.sub("", text)


def of(command_line: Flags) -> dict[str, str]:
    """Return the secrets of a command line, by their full names."""
    found = {}
    for flag in filter(is_secret, command_line):
        name = next(name for name in NAMES if name.startswith(flag.name))
        found[name] = flag.values[-1]
    return found


def public(command_line: Flags) -> Flags:
    """Return a command line without its secrets."""
    return tuple(flag for flag in command_line if not is_secret(flag))


def api_key(file: Path | None, environ: Mapping[str, str]) -> str | None:
    """Return the key from a file, else from the environment; ``None`` when there is neither.

    :raises ApiKeyError: the file cannot be read, or what is there is no key.
    """
    if file is not None:
        try:
            text, where = file.read_text(encoding="utf-8"), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ApiKeyError(
                f"the key file {file} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}",
                hint="One line with the key: `(umask 077; openssl rand -hex 24 > FILE)`.",
            ) from error
    elif VARIABLE in environ:
        text, where = environ[VARIABLE], VARIABLE
    else:
        return None
    key = text.strip()
    what = ""
    if not key:
        what = "is empty"
    elif not all("!" <= letter <= "~" for letter in key):  # it travels in an HTTP header, where nothing else survives
        what = "holds more than one word of printable ASCII"
    elif key.startswith("-"):
        what = _DASH
    if what:
        raise ApiKeyError(f"{where} {what}", hint="One line: `(umask 077; openssl rand -hex 24 > FILE)`.")
    return key


def is_open_to_others(file: Path) -> bool:
    """Tell whether other users of this machine may read a file."""
    return bool(file.stat().st_mode & 0o077)


@dataclass(frozen=True)
class Private:
    """A folder for one engine that nobody else may look into.

    :ivar folder: the keeper removes it when the engine has ended.
    """

    folder: Path

    @property
    def config(self) -> Path:
        """What the engine reads by ``--config``."""
        return self.folder / CONFIG


def private(command_line: Flags) -> Private | None:
    """Write the secrets of a command line where only this user can read them; ``None`` when there are none.

    What the user's own ``--config`` says is taken in: the engine takes one such file.

    :raises ApiKeyError: the user's own file is no such file, or the engine could not read a secret.
    :raises OutputError: nothing can be written.
    """
    secrets = of(command_line)
    if not secrets:
        return None
    if dashed := [name for name, value in secrets.items() if value.startswith("-")]:
        raise ApiKeyError(f"the {dashed[0]} {_DASH}", hint="Take another.")
    theirs = flags.value(command_line, "config")
    document = {**(read_config(Path(theirs)) if theirs else {}), **secrets}
    root = platformdirs.user_state_path("sglang-bw") / "private"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(root)
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))  # of mode 0700
        _write(folder / CONFIG, yaml.safe_dump(document))
        _write(folder / REDACT, json.dumps(sorted(set(secrets.values()))))
    except OSError as error:
        raise OutputError(f"cannot write the engine's key below {root}: {error.strerror}") from error
    return Private(folder)


def given_by_config(path: str | None) -> dict[str, str]:
    """Return the secrets that a user's own ``--config`` file holds.

    :raises ApiKeyError: it is no such file.
    """
    document = read_config(Path(path)) if path else {}
    named = {str(key).replace("_", "-"): value for key, value in document.items()}
    return {name: str(named[name]) for name in NAMES if named.get(name)}


def read_config(path: Path) -> dict[str, Any]:
    """Return what a file of the engine's own ``--config`` format says.

    :raises ApiKeyError: it is no such file.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ApiKeyError(f"the engine's --config {path} cannot be read: {type(error).__name__}") from error
    if not isinstance(document, dict):
        raise ApiKeyError(f"the engine's --config {path} is no YAML mapping")
    return document


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _sweep(root: Path) -> None:
    """Remove what a keeper that was killed has left behind."""
    for folder in _folders(root):
        owner = folder.name.partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> Iterable[Path]:
    with contextlib.suppress(OSError):
        yield from [path for path in root.iterdir() if path.is_dir()]
