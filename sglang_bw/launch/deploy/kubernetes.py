"""A cluster: a Deployment for one node, a LeaderWorkerSet for several, each with its Service and its claim.

LeaderWorkerSet (https://lws.sigs.k8s.io) starts a group of pods together and restarts it together; it tells every pod
the address of the first, the size of the group and its own place, which are just what SGLang wants to know.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from sglang_bw.launch import secret
from sglang_bw.launch.deploy.deployment import (
    CACHE,
    CONTAINER_PORT,
    KEY_FOLDER,
    UID,
    Deployment,
    File,
    check,
    dump,
)
from sglang_bw.launch.nodes import DEFAULT_HEAD_PORT
from sglang_bw.recipes.flags import Flag

_PERIOD_S = 10
_SET_LABEL = "leaderworkerset.sigs.k8s.io/name"
_PLACE_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"

Object = dict[str, Any]


def files(made: Deployment) -> list[File]:
    """Return one file with all objects."""
    check(made)
    several = made.nodes > 1
    objects = [_claim(made), _leader_worker_set(made) if several else _deployment(made), _service(made)]
    lines = [*made.withheld]
    if made.with_key:
        lines += [
            f"The key: a file {secret.CONFIG} with the line `api-key: KEY`, then",
            f"  kubectl create secret generic {made.name}-engine --from-file={secret.CONFIG}",
        ]
    if made.from_hub:
        lines += [
            "For gated models:",
            f"  kubectl create secret generic {made.name}-hub --from-literal=HF_TOKEN=TOKEN",
        ]
    if several:
        lines.append("Needs the LeaderWorkerSet controller, and a storage class that several nodes can write to.")
    if made.gpus:
        lines.append("Needs NVIDIA's device plugin and the runtime class nvidia.")
        if made.chosen:
            lines.append(
                f"Which GPUs of a node a pod gets is the device plugin's choice, not that of --gpus ({made.chosen})."
            )
    return [File("kubernetes.yaml", dump(objects, made.header(*lines)))]


def _labels(made: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "sglang", "app.kubernetes.io/instance": made.name}


def _metadata(made: Deployment, suffix: str = "") -> Object:
    return {
        "name": made.name + suffix,
        "labels": {**_labels(made), "app.kubernetes.io/version": made.version.replace("+", "-")},
    }


def _deployment(made: Deployment) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(made),
        "spec": {
            "replicas": 1,
            # A second pod beside the first would find no free GPU.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _labels(made)},
            "progressDeadlineSeconds": made.startup_s + 600,
            "template": _pod(made, _literal(made.container_command())),
        },
    }


def _leader_worker_set(made: Deployment) -> Object:
    place = {value for flag in _place() for value in flag.values}
    pod = _pod(made, _literal(made.container_command(_place), but=place))
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(made),
        "spec": {
            "replicas": 1,
            # The engine on one node cannot go on without the others, nor take a new one in.
            "leaderWorkerTemplate": {
                "size": made.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": pod,
            },
            # The first node is ready when all are.
            "startupPolicy": "LeaderCreated",
        },
    }


def _literal(words: Iterable[str], but: Collection[str] = ()) -> list[str]:
    """Keep Kubernetes from putting variables in.

    :param but: words in which it shall.
    """
    return [word if word in but else word.replace("$", "$$") for word in words]


def _place() -> tuple[Flag, ...]:
    """Return a node's flags; the controller sets these variables in every pod."""
    return (
        Flag("nnodes", ("$(LWS_GROUP_SIZE)",)),
        Flag("node-rank", ("$(LWS_WORKER_INDEX)",)),
        Flag("dist-init-addr", (f"$(LWS_LEADER_ADDRESS):{DEFAULT_HEAD_PORT}",)),
    )


def _pod(made: Deployment, command: list[str]) -> Object:
    spec: Object = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,  # the claim belongs to that group
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # or a service named sglang would set SGLANG_* variables
        "terminationGracePeriodSeconds": 60,
        "containers": [_container(made, command)],
        "volumes": _volumes(made),
    }
    if made.gpus:
        spec = {"runtimeClassName": "nvidia", **spec}
    return {"metadata": {"labels": _labels(made)}, "spec": spec}


def _container(made: Deployment, command: list[str]) -> Object:
    variables = made.container_env()
    env: list[Object] = [
        {"name": name, "value": value} for name, value in zip(variables, _literal(variables.values()), strict=True)
    ]
    if made.from_hub:
        source = {"name": f"{made.name}-hub", "key": "HF_TOKEN", "optional": True}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": source}})
    mounts: list[Object] = [{"name": "cache", "mountPath": CACHE}, {"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [
        {"name": f"weights-{number}", "mountPath": mount.inside, "readOnly": True}
        for number, mount in enumerate(made.mounts)
    ]
    if made.with_key:
        mounts.append({"name": "engine", "mountPath": KEY_FOLDER, "readOnly": True})
    container: Object = {
        "name": "sglang",
        "image": made.image,
        "command": command,
        "env": env,
        "ports": [{"name": "http", "containerPort": CONTAINER_PORT}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # /health needs no key. Until the first probe succeeds the others wait, so that a long load is no death.
        "startupProbe": _probe(made, failures=math.ceil(made.startup_s / _PERIOD_S)),
        "readinessProbe": _probe(made, failures=3),
        "livenessProbe": _probe(made, failures=12),
        "resources": {"requests": {"cpu": str(made.needs.cores), "memory": f"{made.needs.memory_gib}Gi"}},
        "volumeMounts": mounts,
    }
    if made.gpus:
        container["resources"]["limits"] = {"nvidia.com/gpu": made.gpus}
    return container


def _probe(made: Deployment, failures: int) -> Object:
    asked = {"path": "/health", "port": "http", **({"scheme": "HTTPS"} if made.is_tls else {})}
    return {
        "httpGet": asked,
        "periodSeconds": _PERIOD_S,
        "timeoutSeconds": 9,
        "failureThreshold": failures,
    }


def _volumes(made: Deployment) -> list[Object]:
    volumes: list[Object] = [
        {"name": "cache", "persistentVolumeClaim": {"claimName": f"{made.name}-cache"}},
        # Counts as memory of the pod as far as it is used.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{made.shm_gib}Gi"}},
    ]
    volumes += [
        {"name": f"weights-{number}", "hostPath": {"path": mount.host, "type": "Directory"}}
        for number, mount in enumerate(made.mounts)
    ]
    if made.with_key:
        volumes.append({"name": "engine", "secret": {"secretName": f"{made.name}-engine", "defaultMode": 0o440}})
    return volumes


def _service(made: Deployment) -> Object:
    # Only the first node answers requests.
    selector = {_SET_LABEL: made.name, _PLACE_LABEL: "0"} if made.nodes > 1 else _labels(made)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(made, "-http"),
        "spec": {
            "type": "ClusterIP",
            "selector": selector,
            "ports": [{"name": "http", "port": made.command.port, "targetPort": "http"}],
        },
    }


def _claim(made: Deployment) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(made, "-cache"),
        "spec": {
            "accessModes": ["ReadWriteMany" if made.nodes > 1 else "ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{made.cache_gib}Gi"}},
        },
    }
