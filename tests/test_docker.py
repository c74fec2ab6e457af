"""The image files: linted, their facts held against the series, and the steps of one run without a container engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from sglang_bw.fork.series import Series, newest_base
from sglang_bw.launch.deploy import deployment
from tests.conftest import CHECKOUT, PATCHES
from tests.launch.serving import free_port, until

DOCKER = CHECKOUT / "docker"
FILES = sorted(path.name for path in DOCKER.glob("Dockerfile*"))
# Steps of the system's package manager and user database: they need root in a system of their own.
_OF_THE_SYSTEM = ("apt-get ", "groupadd ", "mkdir /cache")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, continuation lines joined."""

    word: str
    text: str
    stage: int


def instructions(name: str) -> list[Instruction]:
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found: list[Instruction] = []
    stage = -1
    for line in filter(str.strip, joined.splitlines()):
        word, _, text = line.partition(" ")
        stage += word == "FROM"
        found.append(Instruction(word, text.strip(), stage))
    return found


def of(name: str, word: str, stage: int | None = None) -> list[str]:
    return [one.text for one in instructions(name) if one.word == word and stage in (None, one.stage)]


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).parent / "hadolint"
    return subprocess.run(
        [str(hadolint), "--no-color", "--config", str(DOCKER / ".hadolint.yaml"), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", FILES)
def test_hadolint(name: str) -> None:
    done = lint(DOCKER / name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN cd /tmp && sudo apt-get install curl\n")
    done = lint(bad)
    assert done.returncode != 0
    assert "DL3006" in done.stdout


@pytest.mark.parametrize("name", FILES)
def test_facts_are_those_of_the_newest_series(name: str) -> None:
    base = newest_base(PATCHES)
    arguments = dict(text.split("=", 1) for text in of(name, "ARG") if "=" in text)
    assert arguments["BASE"] == base
    assert f"{base}+{arguments['SERIES']}" == Series.load(PATCHES, base).pins.full_version.partition(".d")[0]
    [labels] = of(name, "LABEL")
    assert 'sglang-bw.base="${BASE}"' in labels
    assert 'sglang-bw.series="${SERIES}"' in labels


@pytest.mark.parametrize("name", FILES)
def test_what_deployment_files_expect_of_an_image(name: str) -> None:
    assert of(name, "USER") == [f"{deployment.UID}:{deployment.UID}"]
    assert of(name, "WORKDIR") == [deployment.CACHE]
    assert of(name, "EXPOSE") == [str(deployment.CONTAINER_PORT)]
    assert f"127.0.0.1:{deployment.CONTAINER_PORT}/health" in of(name, "HEALTHCHECK")[0]
    if name != "Dockerfile.sglang":  # it has the engine alone
        assert any('"$PREFIX/models"' in step for step in of(name, "RUN"))
        assert deployment.BUNDLED == "/opt/sglang-bw/models"


def test_the_compose_file_follows_the_specification() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    compose = compose_spec.PyCompose.from_yaml(text)
    compose.validate()
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    for service in services.values():
        assert (CHECKOUT / service["build"]["dockerfile"]).is_file()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_nothing_private_gets_into_a_build() -> None:
    ignored = (CHECKOUT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", ".cache", "dist"} <= set(ignored)
    # What the steps read must get in.
    assert not {"patches", "sglang_bw", "constraints.txt", "README.md", "LICENSE", "NOTICE"} & set(ignored)


@pytest.mark.environments
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_steps_of_the_cpu_image_make_a_server(tmp_path: Path) -> None:
    """Every RUN of the build stage but the package manager's, in a clean environment; then the image's command."""
    prefix, source = tmp_path / "opt", tmp_path / "src"
    prefix.mkdir()
    names = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    ignored = {line for line in (CHECKOUT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#*"}
    for name in names.splitlines():
        if name.partition("/")[0] not in ignored and (CHECKOUT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, source / name)
    kept = ("PATH", "HOME", "LANG", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "SGLANG_BW_CACHE")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ |= {"PREFIX": str(prefix), "SOURCE": str(source), "TORCH_INDEX": ""}
    environ["PATH"] = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), environ["PATH"]])
    ran = 0
    for step in of("Dockerfile.cpu", "RUN", stage=0):
        if not step.startswith(_OF_THE_SYSTEM):
            done = subprocess.run(
                ["bash", "-c", step], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{step}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            ran += 1
    assert ran == 5
    assert (prefix / "models" / "tiny_pair" / "target" / "config.json").is_file()

    [entry], [arguments] = of("Dockerfile.cpu", "ENTRYPOINT"), of("Dockerfile.cpu", "CMD")
    health = json.loads(of("Dockerfile.cpu", "HEALTHCHECK")[0].partition("CMD ")[2])
    port = free_port()
    cache = tmp_path / "cache"
    cache.mkdir()
    environ |= {"PATH": f"{prefix}/venv/bin{os.pathsep}{environ['PATH']}", "HOME": str(cache), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out.txt").open("w") as out:
        command = [*json.loads(entry), *json.loads(arguments), "--port", str(port)]
        process = subprocess.Popen(command, env=environ, cwd=cache, stdout=out, stderr=out)
    try:
        told = (tmp_path / "out.txt").read_text
        until(lambda: "tok/s" in told() or process.poll() is not None, 600, "the image's command serves")
        assert process.poll() is None, told()
        asked = [word.replace("30000", str(port)) for word in health]
        assert subprocess.run(asked, env=environ, check=False).returncode == 0, shlex.join(asked)
        assert "accept length" in told()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert subprocess.run(asked, env=environ, check=False, stderr=subprocess.DEVNULL).returncode != 0
    finally:
        process.kill()
        process.wait()
