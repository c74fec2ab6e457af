"""One machine under systemd: a unit that runs `sglang-bw serve`, one for each node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.launch.deploy.deployment import Deployment, File
from sglang_bw.launch.notify import SPARE_S

CREDENTIAL = "api-key"
# systemd puts it in; everything else in a command line is taken literally.
CREDENTIAL_PATH = "${CREDENTIALS_DIRECTORY}/" + CREDENTIAL
_PLAIN = re.compile(r"[A-Za-z0-9_./:@=,+-]+")
_STOP_S = 60

Section = list[tuple[str, str] | str]


@dataclass(frozen=True)
class Service:
    """What a unit needs beside the deployment.

    :ivar serve: for each node the arguments of ``sglang-bw serve``; :data:`CREDENTIAL_PATH` stands for the key.
    :ivar key_file: where root keeps the key; ``None`` without one.
    :ivar user: who runs it; empty: root, or whoever owns the user manager.
    """

    python: Path
    serve: Sequence[Sequence[str]]
    key_file: Path | None
    user: str


def files(made: Deployment, service: Service) -> list[File]:
    """Return a unit for each node."""
    many = len(service.serve) > 1
    found = []
    for number, arguments in enumerate(service.serve):
        name = f"sglang-{made.name}-node-{number}.service" if many else f"sglang-{made.name}.service"
        found.append(File(name, _unit(made, service, arguments, name)))
    return found


def _unit(made: Deployment, service: Service, arguments: Sequence[str], name: str) -> str:
    lines = [f"Install: cp {name} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {name}"]
    if service.key_file:
        lines.append(f"The key: one line in {service.key_file}, owned by root, mode 0600.")
    sections: list[tuple[str, Section]] = [
        ("Unit", _about(made)),
        ("Service", [*_running(made, service, arguments), *_limits(), *_hardening()]),
        ("Install", [("WantedBy", "multi-user.target")]),
    ]
    return made.header(*lines) + "".join(f"\n[{title}]\n{_text(section)}" for title, section in sections)


def _about(made: Deployment) -> Section:
    return [
        ("Description", f"SGLang {made.version}: {made.recipe}"),
        ("Wants", "network-online.target"),
        ("After", "network-online.target nvidia-persistenced.service"),
        "A launch that cannot work is not tried for ever.",
        ("StartLimitIntervalSec", "3h"),
        ("StartLimitBurst", "3"),
    ]


def _running(made: Deployment, service: Service, arguments: Sequence[str]) -> Section:
    command = [str(service.python), "-P", "-m", "sglang_bw", "serve", *arguments]
    section: Section = [
        "serve tells when it answers, so that what comes After= finds a server.",
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("ExecStart", " ".join(map(_quoted, command))),
    ]
    if service.user:
        section.append(("User", service.user))
    if service.key_file:
        section.append(("LoadCredential", f"{CREDENTIAL}:{str(service.key_file).replace('%', '%%')}"))
    return [
        *section,
        ("TimeoutStartSec", f"{made.startup_s + SPARE_S}"),
        ("TimeoutStopSec", str(_STOP_S)),
        ("Restart", "on-failure"),
        ("RestartSec", "20"),
        "Usage, the recipe, the plan or a missing file: a restart cures none of these.",
        ("RestartPreventExitStatus", "2 20 21 22 30 31 32 50 51 52 54 55 56 62 65 90 91"),
        "SIGTERM for serve alone, which ends the engine in order; SIGKILL for all that is left.",
        ("KillMode", "mixed"),
        ("OOMPolicy", "stop"),
    ]


def _limits() -> Section:
    return [
        "Pinned memory of NCCL and CUDA counts as locked.",
        ("LimitMEMLOCK", "infinity"),
        ("LimitNOFILE", "1048576"),
        ("LimitCORE", "0"),
        ("TasksMax", "infinity"),
    ]


def _hardening() -> Section:
    return [
        "What CUDA needs stays open: no PrivateDevices or ProtectClock (they hide the GPUs), no MemoryDenyWriteExecute",
        "(kernels are compiled at run time), no ProtectHome (caches). The GPUs' device files must be there: run",
        "nvidia-persistenced, for nothing here may become root to make them.",
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "full"),
        ("PrivateTmp", "yes"),
        ("ProtectKernelTunables", "yes"),
        ("ProtectKernelModules", "yes"),
        ("ProtectKernelLogs", "yes"),
        ("ProtectControlGroups", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("LockPersonality", "yes"),
        ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"),
        ("UMask", "0077"),
    ]


def _text(section: Section) -> str:
    return "".join(f"# {line}\n" if isinstance(line, str) else f"{line[0]}={line[1]}\n" for line in section)


def _quoted(word: str) -> str:
    """Write a word so that systemd reads it as it is; see systemd.syntax(7) and systemd.service(5)."""
    if word == CREDENTIAL_PATH:
        return word
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n").replace("$", "$$")
    return word if _PLAIN.fullmatch(word) else f'"{text}"'
