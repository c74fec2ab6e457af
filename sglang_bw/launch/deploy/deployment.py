"""A launch as something else will run it: a container, a pod, or a unit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from sglang_bw import models
from sglang_bw.errors import EmitError
from sglang_bw.launch import secret
from sglang_bw.launch.command import Command
from sglang_bw.launch.deploy.needs import Needs
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flag, Flags

# Inside a container. The images of this repository put the bundled models there.
BUNDLED = "/opt/sglang-bw/models"
CACHE = "/cache"
KEY_FOLDER = "/run/secrets/sglang-bw"
KEY_CONFIG = f"{KEY_FOLDER}/{secret.CONFIG}"
CONTAINER_PORT = 30000
# The user of the images of this repository; the official SGLang image runs under any.
UID = 1000
# GPUs of one node talk through /dev/shm where they have no other way; a limit, not a reservation.
_SHM_GIB = {"cuda": 32, "cpu": 2}
_PATH_FLAGS = ("model-path", "speculative-draft-model-path", "tokenizer-path")
# Whoever gives a container its GPUs numbers them anew from 0: the host's numbers would name others there, or none.
_OF_THE_HOST = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_NOT_IN_A_LABEL = re.compile(r"[^a-z0-9]+")
_NOT_IN_A_MOUNT = re.compile(r"[^A-Za-z0-9._-]+")
# What a number is differs between YAML 1.1, written here, and 1.2, which Docker and Kubernetes read: `1e-1`, `0o17`.
_SURELY_TEXT = re.compile(r"[A-Za-z]{2}|--|/")


@dataclass(frozen=True)
class File:
    """One file to write."""

    name: str
    text: str


@dataclass(frozen=True)
class Mount:
    """A folder of the host that the container sees, read-only."""

    host: str
    inside: str


@dataclass(frozen=True)
class Deployment:
    """What every kind of file is made from.

    :ivar command: the launch on node 0.
    :ivar image: of the container.
    :ivar nodes: machines.
    :ivar gpus: on each of them; 0 on a CPU.
    :ivar with_key: the engine reads its key from :data:`KEY_CONFIG`.
    :ivar startup_s: how long the load may take.
    :ivar cache_gib: disk for weights from the hub.
    :ivar needs: what else a node must have.
    :ivar source: the `sglang-bw` line that made it.
    """

    recipe: str
    version: str
    command: Command
    image: str
    nodes: int
    gpus: int
    with_key: bool
    startup_s: int
    cache_gib: int
    needs: Needs
    source: str

    @property
    def name(self) -> str:
        """A name that is a DNS label as services want it: lower case, digits and dashes, first a letter."""
        name = _NOT_IN_A_LABEL.sub("-", self.recipe.lower()).strip("-")
        return (name if name[:1].isalpha() else f"sglang-{name}")[:50].rstrip("-")

    @property
    def chosen(self) -> str | None:
        """Which GPUs of the host the user has chosen, as CUDA takes them."""
        return self.command.env.get("CUDA_VISIBLE_DEVICES") or None

    @property
    def shm_gib(self) -> int:
        """Size of ``/dev/shm`` in GiB."""
        return _SHM_GIB[self.command.device]

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Folders of weights that lie on the host; two of one name lie apart in the container."""
        found: dict[str, str] = {}
        for root in dict.fromkeys(str(_root(value)) for value in self._local() if not _is_bundled(value)):
            inside = "/models/" + (_NOT_IN_A_MOUNT.sub("-", Path(root).name).strip("-") or "model")
            while inside in found:
                inside += "-2"
            found[inside] = root
        return tuple(Mount(host, inside) for inside, host in found.items())

    @property
    def is_tls(self) -> bool:
        """Whether the engine answers over TLS only."""
        return flags.has(self.command.flags, "ssl-certfile")

    @property
    def from_hub(self) -> bool:
        """Whether something is fetched from the hub."""
        return any(value and not _is_path(value) for value in (self.command.target, self.command.draft))

    def container_command(self, place: Callable[[], tuple[Flag, ...]] | None = None) -> list[str]:
        """Return what the container runs: the engine itself, its paths those of the container.

        :param place: the flags of a node's place among several, where they are not known yet.
        """
        line = tuple(self._moved(flag) for flag in secret.public(self.command.flags))
        own = (Flag("host", ("0.0.0.0",)), Flag("port", (str(CONTAINER_PORT),)), *(place() if place else ()))
        if self.with_key:
            own = (*own, Flag("config", (KEY_CONFIG,)))
        return ["python3", "-P", "-m", "sglang.launch_server", *flags.tokens(flags.merge(line, own))]

    def container_env(self) -> dict[str, str]:
        """Return the container's environment; what is secret is not in it, nor which of the host's GPUs it gets."""
        public = {
            name: value
            for name, value in self.command.env.items()
            if not secret.is_secret_variable(name) and name not in _OF_THE_HOST
        }
        # Compiled kernels go below HOME: they survive a restart there.
        return {"HOME": CACHE, "HF_HOME": f"{CACHE}/huggingface", "PYTHONUNBUFFERED": "1", **public}

    @property
    def withheld(self) -> tuple[str, ...]:
        """Lines that name the secret variables of the launch, which no file of a container holds."""
        names = [name for name in self.command.env if secret.is_secret_variable(name)]
        return (f"Secret, and so not in here; add it to the environment: {', '.join(names)}.",) if names else ()

    def header(self, *lines: str) -> str:
        """Return the comment at the head of a file."""
        made = (
            f"{self.recipe} on sglang {self.version}, made by",
            f"  {self.source}",
            f"Nodes: {self.nodes}, GPUs on each: {self.gpus}.",
        )
        # What the user typed may hold line ends, and must stay a comment.
        return "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in (*made, *lines))

    def _local(self) -> list[str]:
        values = [flags.value(self.command.flags, name) for name in _PATH_FLAGS]
        return [value for value in values if value and _is_path(value)]

    def _moved(self, flag: Flag) -> Flag:
        if flag.key in _PATH_FLAGS and flag.values and _is_path(flag.values[-1]):
            return Flag(flag.name, (self._inside(flag.values[-1]),))
        return flag

    def _inside(self, host: str) -> str:
        """Return where the container sees a path of the host."""
        if _is_bundled(host):
            return f"{BUNDLED}/{Path(host).relative_to(models.BUNDLED)}"
        root = _root(host)
        inside = next(mount.inside for mount in self.mounts if mount.host == str(root))
        return inside if root == Path(host) else f"{inside}/{Path(host).resolve().relative_to(root)}"


class _Dumper(yaml.SafeDumper):
    """Quotes whatever some reader of YAML might not take for text."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if _SURELY_TEXT.match(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def dump(documents: Sequence[Mapping[str, object]], header: str = "") -> str:
    """Return documents as YAML, keys in their order."""
    return header + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=110, explicit_start=len(documents) > 1
    )


def anchored(line: Flags) -> Flags:
    """Return flags with files and folders of this machine by their absolute paths: a unit starts elsewhere."""
    return tuple(Flag(flag.name, tuple(_absolute(flag, value) for value in flag.values), flag.dashes) for flag in line)


def check(deployment: Deployment) -> None:
    """Refuse what no container could run.

    :raises EmitError: a flag names a file of this machine, or weights are links that lead out of their folder.
    """
    for flag in deployment.command.flags:
        known = flag.key in _PATH_FLAGS
        if not known and any(value.startswith("/") and _is_here(value) for value in flag.values):
            raise EmitError(
                f"--{flag.name} {' '.join(flag.values)} is a file of this machine, which a container does not see",
                hint="Leave it out, or put it into an image of your own and name it there.",
            )
    for mount in deployment.mounts:
        if link := _leads_out(Path(mount.host)):
            raise EmitError(
                f"{link} is a link out of {mount.host}, and a container sees that folder alone",
                hint=f"Copy what it leads to: `cp -rL {shlex.quote(mount.host)} DIR`, and name DIR.",
            )


def _leads_out(root: Path) -> Path | None:
    """Return a link below a folder of weights whose file a mount of that folder does not bring along."""
    real = root.resolve()
    links = (path for path in sorted(root.rglob("*")) if path.is_symlink())
    return next((link for link in links if not link.resolve().is_relative_to(real)), None)


def _root(value: str) -> Path:
    """Return the folder to mount: a snapshot of the hub's cache is links into the folder of its model."""
    real = Path(value).resolve()
    is_snapshot = real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
    return real.parents[1] if is_snapshot else Path(value)


def _is_bundled(value: str) -> bool:
    return Path(value).is_relative_to(models.BUNDLED)


def _is_path(value: str) -> bool:
    return value.startswith("/")


def _absolute(flag: Flag, value: str) -> str:
    """Return a value as an absolute path where it names something here, and is no word that a file also has."""
    meant = flag.key in _PATH_FLAGS or "/" in value or Path(value).suffix
    return str(Path(value).absolute()) if meant and _is_here(value) else value


def _is_here(value: str) -> bool:
    try:
        return bool(value) and Path(value).exists()
    except (OSError, ValueError):  # too long for a name, or with a zero byte in it
        return False
