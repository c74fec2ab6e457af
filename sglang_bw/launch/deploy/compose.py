"""One node under Docker or Podman: a file for ``docker compose``, as the Compose Specification has it."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from sglang_bw.errors import EmitError
from sglang_bw.launch import secret
from sglang_bw.launch.deploy.deployment import CACHE, CONTAINER_PORT, KEY_CONFIG, Deployment, File, check, dump

# Asks the engine as a probe would; the official image has no curl in every release.
_HEALTH = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{CONTAINER_PORT}/health', timeout=10)"
# The certificate has the name of the machine, not of the loopback.
_HEALTH_TLS = (
    "import ssl, urllib.request as u; "
    f"u.urlopen('https://127.0.0.1:{CONTAINER_PORT}/health', timeout=10, context=ssl._create_unverified_context())"
)


def files(made: Deployment) -> list[File]:
    """Return ``compose.yaml``.

    :raises EmitError: several nodes, where compose knows one; or what no container could run.
    """
    check(made)
    if made.nodes > 1:
        raise EmitError(
            f"{made.recipe} takes {made.nodes} nodes, and compose runs on one",
            hint="--emit kubernetes makes a LeaderWorkerSet; --emit systemd a unit for each node.",
        )
    document: dict[str, Any] = {
        "name": made.name,
        "services": {made.name: _service(made)},
        "volumes": {"cache": {}},
    }
    lines: tuple[str, ...] = (
        *made.withheld,
        "Start: docker compose up --wait; log: docker compose logs -f.",
        *(("For gated models: HF_TOKEN in the environment of that command.",) if made.from_hub else ()),
    )
    if made.with_key:
        document["secrets"] = {"engine": {"file": f"./{secret.CONFIG}"}}
        lines = (
            *lines,
            f"The key: a file {secret.CONFIG} beside this one with the line `api-key: KEY`, readable for the",
            "container's user (1000 in this project's images) and nobody else.",
        )
    return [File("compose.yaml", dump([document], made.header(*lines)))]


def _service(made: Deployment) -> dict[str, Any]:
    # Without a value compose takes the one of who starts it, and sets none where there is none.
    token: dict[str, None] = {"HF_TOKEN": None} if made.from_hub else {}
    service: dict[str, Any] = {
        "image": _literal(made.image),
        "entrypoint": [_literal(word) for word in made.container_command()],
        "environment": {name: _literal(value) for name, value in made.container_env().items()} | token,
        "ports": [_published(made)],
        "volumes": [
            {"type": "volume", "source": "cache", "target": CACHE},
            *({"type": "bind", "source": _literal(m.host), "target": m.inside, "read_only": True} for m in made.mounts),
        ],
        "shm_size": f"{made.shm_gib}gb",
        "init": True,
        "restart": "unless-stopped",
        "stop_grace_period": "60s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _HEALTH_TLS if made.is_tls else _HEALTH],
            "interval": "15s",
            "timeout": "12s",
            "retries": 4,
            # Failures count from then on only: the load takes its time.
            "start_period": f"{made.startup_s}s",
        },
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "ulimits": {"memlock": -1, "nofile": {"soft": 1048576, "hard": 1048576}},
    }
    if made.with_key:
        service["secrets"] = [{"source": "engine", "target": KEY_CONFIG}]
    if made.gpus:
        device = {"driver": "nvidia", "capabilities": ["gpu"], **_which(made)}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _published(made: Deployment) -> str:
    """Return the port of the host: on the address that was asked for, which is loopback by default.

    :raises EmitError: it is a name, which compose does not look up.
    """
    host = {"0.0.0.0": "", "::": "", "localhost": "127.0.0.1"}.get(made.command.host, made.command.host)
    try:
        ip_address(host or "0.0.0.0")
    except ValueError:
        raise EmitError(
            f"compose publishes a port on an address, and {host} is a name", hint="--host ADDRESS, or --host 0.0.0.0."
        ) from None
    address = f"[{host}]:" if ":" in host else f"{host}:" if host else ""
    return f"{address}{made.command.port}:{CONTAINER_PORT}"


def _literal(text: str) -> str:
    """Keep compose from putting variables in."""
    return text.replace("$", "$$")


def _which(made: Deployment) -> dict[str, Any]:
    """Name the GPUs that the user has chosen; else so many."""
    return {"device_ids": made.chosen.split(",")} if made.chosen else {"count": made.gpus}
