"""`serve --emit`: what is written is held against each system's own rules, and a unit's line is run."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import compose_spec
import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from sglang_bw.cli import cli
from sglang_bw.errors import BwError, EmitError, UnsafeLaunchError
from sglang_bw.fork.series import Series, newest_base
from sglang_bw.launch import command as commands
from sglang_bw.launch import secret
from sglang_bw.launch.deploy import needs
from sglang_bw.launch.deploy.systemd import CREDENTIAL_PATH, _quoted
from sglang_bw.recipes import flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe
from tests.conftest import PATCHES
from tests.launch.serving import DEADLINE_S, free_port, until

KUBERNETES = "1.37"
SCHEMA = yaml.safe_load((Path(__file__).parent / "data" / "leaderworkerset.yaml").read_text())
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = ["minimax-m2.7-nvfp4-eagle3", "--no-check"]
PINNED = ["--", "--revision", COMMIT, "--speculative-draft-model-revision", COMMIT]
TINY = ["tiny", "--device", "cpu"]


@functools.cache
def emit(form: str, *arguments: str) -> dict[str, str]:
    """Return the files by their names."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    command = ["serve", *arguments[:cut], "--emit", form, "--json", *arguments[cut:]]
    done = CliRunner().invoke(cli, command, catch_exceptions=True)
    if isinstance(done.exception, BwError):
        raise done.exception
    assert done.exit_code == 0, done.output
    files: dict[str, str] = json.loads(done.stdout)["files"]
    return files


def refused(form: str, *arguments: str) -> str:
    done = CliRunner().invoke(cli, ["serve", "--emit", form, *arguments])
    assert done.exit_code == 2, done.output
    return done.output.replace("\n", " ")


def objects(*arguments: str) -> dict[str, dict[str, Any]]:
    text = emit("kubernetes", *arguments)["kubernetes.yaml"]
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def validate(document: dict[str, Any]) -> None:
    """Hold one object against the API: unknown fields are errors."""
    if document["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    jsonschema.validate(document, SCHEMA)
    template = document["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    labels = template["metadata"]["labels"]
    pods = {"selector": {"matchLabels": labels}, "template": template}
    around = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": pods}
    kubernetes_validate.validate(around, KUBERNETES, strict=True)


def after(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1, words
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(TINY, id="tiny on a CPU"),
        pytest.param([*TINY, "--open"], id="without a key"),
        pytest.param([*LARGE, *PINNED], id="two GPUs, from the hub"),
        pytest.param([*LARGE, "--nodes", "2", *PINNED], id="two nodes"),
    ],
)
def test_the_kubernetes_api_takes_it(arguments: list[str]) -> None:
    found = objects(*arguments)
    assert set(found) - {"Deployment", "LeaderWorkerSet"} == {"PersistentVolumeClaim", "Service"}
    for document in found.values():
        validate(document)


@pytest.mark.parametrize("arguments", [TINY, [*LARGE, "--nodes", "2", *PINNED]], ids=["Deployment", "LeaderWorkerSet"])
def test_the_check_itself_finds_what_is_wrong(arguments: list[str]) -> None:
    found = objects(*arguments)
    kind = "Deployment" if "Deployment" in found else "LeaderWorkerSet"
    for place, value in (("containers", [{"image": "x"}]), ("noSuchField", 1)):
        broken = copy.deepcopy(found[kind])
        spec = broken["spec"].get("leaderWorkerTemplate", broken["spec"])
        spec.get("workerTemplate", spec.get("template"))["spec"][place] = value
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            validate(broken)
    if kind == "LeaderWorkerSet":
        broken = copy.deepcopy(found[kind])
        broken["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
        with pytest.raises(jsonschema.ValidationError):
            validate(broken)


def test_a_pod_has_what_the_launch_needs() -> None:
    found = objects(*LARGE, "--startup-timeout", "900", *PINNED)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    command = container["command"]
    assert pod["runtimeClassName"] == "nvidia"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": int(after(command, "--tp-size"))}
    assert after(command, "--host") == "0.0.0.0"
    assert after(command, "--revision") == COMMIT
    assert after(command, "--config") == "/run/secrets/sglang-bw/engine.yaml"
    assert {"name": "engine", "mountPath": "/run/secrets/sglang-bw", "readOnly": True} in container["volumeMounts"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 900
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    token = next(one for one in container["env"] if one["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    selector = found["Service"]["spec"]["selector"]
    assert selector.items() <= found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()


def needed(*arguments: str) -> tuple[int, int]:
    """Return cores and GiB that a pod asks for."""
    found = objects(*arguments)
    kind = "Deployment" if "Deployment" in found else "LeaderWorkerSet"
    spec = found[kind]["spec"]
    template = spec["template"] if kind == "Deployment" else spec["leaderWorkerTemplate"]["workerTemplate"]
    [container] = template["spec"]["containers"]
    assert set(container["resources"].get("limits", {})) <= {"nvidia.com/gpu"}  # a limit would stall a rank
    asked = container["resources"]["requests"]
    assert asked["memory"].endswith("Gi")
    return int(asked["cpu"]), int(asked["memory"].removesuffix("Gi"))


def test_a_pod_asks_for_cores_and_memory() -> None:
    cores, memory = needed(*TINY)
    assert cores == 4  # one rank, tokenizer, detokenizer, one more
    assert 4 <= memory <= 6
    assert needed(*TINY, "--", "--tp-size", "2", "--tokenizer-worker-num", "3")[0] == 7
    cores, memory = needed(*LARGE, *PINNED)
    assert cores == 5
    assert memory == 2 * 4 + 3 + 2 + 47  # ranks, helpers, shared memory, ten shards of 5 GB
    assert needed(*LARGE, "--nodes", "2", "--", *PINNED[1:], "--tp-size", "4")[0] == 5  # each node its own
    # What the recipe has measured of its weights: 580 GB want a large host.
    huge = ["kimi-k2.5-int4-eagle3", "--no-check", *PINNED]
    assert needed(*huge) == (11, 128)
    assert needed(huge[0], *PINNED) == (11, 128)  # the plan knows as much
    assert needed(*huge, "--hicache-size", "32")[1] == 8 * 4 + 3 + 8 + 47 + 8 * 32


def test_the_plan_knows_small_weights() -> None:
    small = ["qwen3-8b-eagle3"]
    planned, guessed = needed(*small)[1], needed(*small, "--no-check")[1]
    assert guessed == 4 + 3 + 47
    assert 4 + 3 + 15 < planned < 4 + 3 + 20  # 8 billion parameters of 16 bits


@pytest.mark.parametrize(
    ("extra", "ranks", "weights", "cores", "memory"),
    [
        ((), 1, 10 << 30, 4, 4 + 3 + 10),
        ((), 8, None, 11, 8 * 4 + 3 + 8 + 47),
        (("--weight-loader-disable-mmap",), 2, 10 << 30, 5, 2 * 4 + 3 + 2 + 2 * 10),
        (("--cpu-offload-gb", "20"), 2, 0, 5, 2 * 4 + 3 + 2 + 47 + 2 * 20),
        (("--dp-size", "2"), 2, 10 << 30, 6, 2 * 4 + 4 + 2 + 10),
        (("--cpu-offload-gb", "nan", "--tokenizer-worker-num", "-3"), 1, 10 << 30, 4, 4 + 3 + 10),
    ],
)
def test_what_a_node_must_have(
    extra: tuple[str, ...], ranks: int, weights: int | None, cores: int, memory: int
) -> None:
    recipe = Recipe.model_validate({"id": "my", "target": "owner/model"})
    command = commands.build(recipe, Hardware(device="cuda"), {}, extra=flags.parse(extra))
    assert needs.of(command, ranks, weights) == needs.Needs(cores, memory)


def test_the_device_plugin_chooses_the_gpus_of_a_pod() -> None:
    chosen = [*LARGE, "--gpus", "4,5", *PINNED]
    [container] = objects(*chosen)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & {one["name"] for one in container["env"]}
    told = "# Which GPUs of a node a pod gets is the device plugin's choice, not that of --gpus (4,5).\n"
    assert told in emit("kubernetes", *chosen)["kubernetes.yaml"]
    assert "device plugin's choice" not in emit("kubernetes", *LARGE, *PINNED)["kubernetes.yaml"]


def test_replicas_have_gpus_of_their_own() -> None:
    def gpus(*extra: str) -> int:
        spec = objects(*LARGE, *PINNED, *extra)["Deployment"]["spec"]["template"]["spec"]
        count: int = spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        return count

    assert gpus() == 2
    assert gpus("--dp-size", "2") == 4
    assert gpus("--dp-size", "2", "--enable-dp-attention") == 2


def test_every_pod_of_a_group_knows_its_place() -> None:
    found = objects(*LARGE, "--nodes", "2", "--", *PINNED[1:], "--tp-size", "4")
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    [container] = template["workerTemplate"]["spec"]["containers"]
    assert after(container["command"], "--nnodes") == "$(LWS_GROUP_SIZE)"
    assert after(container["command"], "--node-rank") == "$(LWS_WORKER_INDEX)"
    assert after(container["command"], "--dist-init-addr") == "$(LWS_LEADER_ADDRESS):20000"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert found["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(TINY, id="tiny on a CPU"),
        pytest.param([*TINY, "--host", "0.0.0.0"], id="with a key"),
        pytest.param([*LARGE, "--gpus", "0,1", *PINNED], id="two GPUs"),
    ],
)
def test_the_compose_specification_takes_it(arguments: list[str], tmp_path: Path) -> None:
    text = emit("compose", *arguments)["compose.yaml"]
    compose = compose_spec.PyCompose.from_yaml(text)
    compose.validate()
    document = yaml.safe_load(text)
    # What is not in the specification would be lost on the way through it.
    assert set(yaml.safe_load(compose.to_yaml())["services"][document["name"]]) == set(
        document["services"][document["name"]]
    )
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], check=False).returncode == 0:
        (tmp_path / "compose.yaml").write_text(text)
        (tmp_path / "engine.yaml").write_text("api-key: k\n")
        subprocess.run(["docker", "compose", "config", "--quiet"], cwd=tmp_path, check=True)


def test_compose_takes_the_token_of_gated_models_from_who_starts_it() -> None:
    text = emit("compose", *LARGE, *PINNED)["compose.yaml"]
    [service] = yaml.safe_load(text)["services"].values()
    assert service["environment"]["HF_TOKEN"] is None  # no value: that of the shell
    assert "# For gated models: HF_TOKEN in the environment of that command.\n" in text
    [bundled] = yaml.safe_load(emit("compose", *TINY)["compose.yaml"])["services"].values()
    assert "HF_TOKEN" not in bundled["environment"]


def test_compose_publishes_to_this_machine_unless_asked() -> None:
    def service(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(emit("compose", *arguments)["compose.yaml"])["services"]
        return next(iter(found.values()))

    own = service(*TINY)
    assert own["ports"] == ["127.0.0.1:30000:30000"]
    assert "secrets" not in own
    everybody = service(*TINY, "--host", "0.0.0.0", "--port", "8000")
    assert everybody["ports"] == ["8000:30000"]
    assert everybody["secrets"] == [{"source": "engine", "target": "/run/secrets/sglang-bw/engine.yaml"}]
    assert after(everybody["entrypoint"], "--config") == "/run/secrets/sglang-bw/engine.yaml"
    gpus = service(*LARGE, "--gpus", "4,5", *PINNED)
    device = gpus["deploy"]["resources"]["reservations"]["devices"]
    assert device == [{"driver": "nvidia", "capabilities": ["gpu"], "device_ids": ["4", "5"]}]
    # The container sees them as 0 and 1.
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & set(gpus["environment"])
    dollar = service(*TINY, "--", "--chat-template", "a$b")
    assert after(dollar["entrypoint"], "--chat-template") == "a$$b"


def test_weights_of_this_disk_are_mounted(model: Path) -> None:
    arguments = ["tiny", "--device", "cpu", "--model-path", str(model)]
    [service] = yaml.safe_load(emit("compose", *arguments)["compose.yaml"])["services"].values()
    assert after(service["entrypoint"], "--model-path") == f"/models/{model.name}"
    assert {"type": "bind", "source": str(model), "target": f"/models/{model.name}", "read_only": True} in service[
        "volumes"
    ]
    pod = objects(*arguments)["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "weights-0", "hostPath": {"path": str(model), "type": "Directory"}} in pod["volumes"]


def test_two_folders_of_one_name_lie_apart(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "elsewhere" / model.name
    shutil.copytree(model, draft)
    arguments = ["tiny", "--device", "cpu", "--model-path", str(model), "--draft", str(draft)]
    [service] = yaml.safe_load(emit("compose", *arguments)["compose.yaml"])["services"].values()
    bound = {volume["target"]: volume["source"] for volume in service["volumes"] if volume["type"] == "bind"}
    assert bound[after(service["entrypoint"], "--model-path")] == str(model)
    assert bound[after(service["entrypoint"], "--speculative-draft-model-path")] == str(draft)


def test_a_snapshot_of_the_hub_s_cache_comes_with_its_files(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(model, cache / "blobs")
    for path in (cache / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    arguments = ["tiny", "--device", "cpu", "--model-path", str(snapshot)]
    pod = objects(*arguments)["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "weights-0", "hostPath": {"path": str(cache), "type": "Directory"}} in pod["volumes"]
    [container] = pod["containers"]
    assert after(container["command"], "--model-path") == f"/models/{cache.name}/snapshots/abc"
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").symlink_to(cache / "blobs" / "config.json")
    with pytest.raises(EmitError, match=r"config\.json is a link out of"):
        emit("compose", "tiny", "--device", "cpu", "--no-check", "--model-path", str(linked))


def test_relative_paths_are_those_of_this_folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("x")
    (tmp_path / "word").write_text("x")
    shutil.copytree(model, tmp_path / "tokenizer")
    extra = ["--", "--tokenizer-path", "tokenizer", "--served-model-name", "word"]
    words = exec_start(unit_of(*TINY, *extra, "--chat-template", "mine.jinja")[1])
    assert after(words, "--chat-template") == str(tmp_path / "mine.jinja")
    assert after(words, "--tokenizer-path") == str(tmp_path / "tokenizer")
    assert after(words, "--served-model-name") == "word"
    [service] = yaml.safe_load(emit("compose", *TINY, *extra)["compose.yaml"])["services"].values()
    assert after(service["entrypoint"], "--tokenizer-path") == "/models/tokenizer"
    with pytest.raises(EmitError, match="is a file of this machine"):
        emit("compose", *TINY, "--", "--chat-template", "mine.jinja")


def test_odd_names_are_taken_literally(model: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a $HOME: 'b'"
    shutil.copytree(model, odd)
    arguments = ["tiny", "--device", "cpu", "--model-path", str(odd), "--", "--chat-template", "$(HOME) $$"]
    [service] = yaml.safe_load(emit("compose", *arguments)["compose.yaml"])["services"].values()
    inside = "/models/a-HOME-b"
    bind = {"type": "bind", "source": str(odd).replace("$", "$$"), "target": inside, "read_only": True}
    assert bind in service["volumes"]
    pod = objects(*arguments)["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert after(container["command"], "--model-path") == inside
    assert after(container["command"], "--chat-template") == "$$(HOME) $$$$"  # $(HOME) would be /cache
    assert {"name": "weights-0", "hostPath": {"path": str(odd), "type": "Directory"}} in pod["volumes"]


@pytest.mark.parametrize("form", ["compose", "kubernetes"])
def test_every_reader_of_yaml_sees_the_same(form: str) -> None:
    """Docker and Kubernetes read numbers as YAML 1.2 does, for which PyYAML would put no quotes."""
    words = ["1e-1", "0o17", "y", "12e03", ".5e1", "-1e1"]
    [text] = emit(
        form, *TINY, "--", *(word for number in words for word in ("--schedule-conservativeness", number))
    ).values()
    plain = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken) and token.plain]
    number = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+|[yYnN]")
    read = {token.value for token in plain if number.fullmatch(token.value)}
    assert all(word.isdigit() or word == "-1" for word in read)  # ports, counts, seconds: numbers that are meant
    assert not read & set(words)


def test_probes_speak_tls_where_the_engine_does() -> None:
    arguments = [*TINY, "--", "--ssl-certfile", "/certs/tls.crt", "--ssl-keyfile", "/certs/tls.key"]
    [container] = objects(*arguments)["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}
    [service] = yaml.safe_load(emit("compose", *arguments)["compose.yaml"])["services"].values()
    assert "https://127.0.0.1" in service["healthcheck"]["test"][-1]
    compile(service["healthcheck"]["test"][-1], "health", "exec")


def test_a_service_s_name_begins_with_a_letter(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("id: 3b.model\ntarget: {bundled: tiny_pair/target}\n")
    found = objects(str(recipe), "--device", "cpu", "--no-check")
    assert found["Service"]["metadata"]["name"] == "sglang-3b-model-http"


def test_a_unit_keeps_its_log() -> None:
    assert after(exec_start(unit_of(*TINY, "--log", "/var/log/my engine.log")[1]), "--log") == "/var/log/my engine.log"


def test_what_cannot_be_emitted(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match="compose runs on one"):
        emit("compose", *LARGE, "--nodes", "2", *PINNED)
    template = tmp_path / "template.jinja"
    template.write_text("x")
    with pytest.raises(EmitError, match="is a file of this machine"):
        emit("kubernetes", *TINY, "--", "--chat-template", str(template))
    with pytest.raises(UnsafeLaunchError, match="no commit is pinned"):
        emit("kubernetes", *LARGE)
    assert "--head" in refused("systemd", *TINY, "--nodes", "2")
    with pytest.raises(EmitError, match=r"my\.host is a name"):
        emit("compose", *TINY, "--host", "my.host")
    assert "--log" in refused("kubernetes", *TINY, "--log", "x")
    for option in ("--output", "--image", "--api-key-file", "--log"):
        assert "it is empty" in refused("systemd", *TINY, option, "")
    assert "says where the key goes" in refused("kubernetes", *TINY, "--", "--api-key", "k")
    assert "goes with --emit" in CliRunner().invoke(cli, ["serve", *TINY, "--dry-run", "--image", "x"]).output


def test_no_engine_need_be_here(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    [text] = emit("compose", *LARGE[:1], "--python", python, *PINNED).values()  # with the plan's checks
    base = newest_base(PATCHES)
    assert f"sglang {Series.load(PATCHES, base).pins.full_version}," in text


def test_no_key_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(secret.VARIABLE, "k3y-0123456789")
    key = tmp_path / "key"
    key.write_text("k3y-0123456789")
    for form in ("compose", "kubernetes", "systemd"):
        emit.cache_clear()
        assert "k3y" not in "".join(emit(form, *TINY, "--api-key-file", str(key)).values())


def test_secret_variables_of_a_recipe_are_named_and_not_written(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("id: mine\ntarget: {bundled: tiny_pair/target}\nenv: {HF_TOKEN: hf-0123, MY_PASSWORD: p4ss}\n")
    for form in ("compose", "kubernetes"):
        [text] = emit(form, str(recipe), "--device", "cpu", "--no-check").values()
        assert "# Secret, and so not in here; add it to the environment: HF_TOKEN, MY_PASSWORD.\n" in text
        assert not {"hf-0123", "p4ss"} & set(re.findall(r"[\w-]+", text))


def test_what_the_user_typed_stays_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sglang-bw", "serve", "tiny\nevil: true"])
    emit.cache_clear()
    assert "evil" not in yaml.safe_load(emit("compose", *TINY)["compose.yaml"])


def test_files_are_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["serve", *TINY, "--emit", "compose", "-o", str(tmp_path / "new")])
    assert done.exit_code == 0
    assert yaml.safe_load((tmp_path / "new" / "compose.yaml").read_text())["name"] == "tiny"
    (tmp_path / "taken" / "compose.yaml").mkdir(parents=True)
    done = CliRunner().invoke(cli, ["serve", *TINY, "--emit", "compose", "-o", str(tmp_path / "taken")])
    assert getattr(done.exception, "exit_code", 0) == 17
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["compose.yaml"]
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli, ["serve", *TINY, "--emit", "compose", "-o", str(tmp_path / "file")])
    assert getattr(done.exception, "exit_code", 0) == 17


# systemd -------------------------------------------------------------------------------------------------------------


def unit_of(*arguments: str) -> tuple[str, str]:
    [(name, text)] = emit("systemd", *arguments).items()
    return name, text


def exec_start(text: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(TINY, id="tiny"),
        pytest.param([*TINY, "--host", "0.0.0.0"], id="with a key"),
        pytest.param([*TINY, "--", "--chat-template", 'a "b" $c %d \\e'], id="odd characters"),
    ],
)
def test_systemd_takes_the_unit(arguments: list[str], tmp_path: Path) -> None:
    name, text = unit_of(*arguments)

    def complaints(content: str) -> str:
        (tmp_path / name).write_text(content)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        )
        return "".join(line + "\n" for line in done.stderr.splitlines() if name in line)

    assert complaints(text) == ""
    assert "Unknown key" in complaints(text.replace("KillMode=", "KillMood="))
    assert complaints(text.replace("Type=notify", "Type=sometimes"))


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("/usr/bin/python3", "/usr/bin/python3"),
        ("two words", '"two words"'),
        ("50%", '"50%%"'),
        ("$HOME", '"$$HOME"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("a\\b", '"a\\\\b"'),
        ("", '""'),
        (CREDENTIAL_PATH, CREDENTIAL_PATH),
    ],
)
def test_words_are_taken_literally(word: str, written: str) -> None:
    assert _quoted(word) == written


def test_a_unit_for_each_node() -> None:
    found = emit("systemd", *TINY, "--nodes", "2", "--head", "10.0.0.1")
    assert list(found) == ["sglang-tiny-node-0.service", "sglang-tiny-node-1.service"]
    words = exec_start(found["sglang-tiny-node-1.service"])
    assert after(words, "--node-rank") == "1"
    assert after(words, "--head") == "10.0.0.1"


def test_the_unit_s_line_serves_and_tells_systemd(
    fake_tree: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What systemd would do with the unit, but for its sandbox: the line, the credential, the notification."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    key = tmp_path / "the key"
    key.write_text("k3y-0123456789\n")
    port = free_port()
    common = ["--model-path", str(model), "--draft", str(model), "--engine-tree", str(fake_tree)]
    _, text = unit_of(*TINY, *common, "--port", str(port), "--api-key-file", str(key), "--", "--log-level", "info")
    assert f"LoadCredential=api-key:{key}" in text
    assert "Type=notify" in text
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "api-key").write_text(key.read_text())
    (credentials / "api-key").chmod(0o400)
    words = [word.replace("${CREDENTIALS_DIRECTORY}", str(credentials)) for word in exec_start(text)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(DEADLINE_S)
        environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "FAKE_PIDS": str(tmp_path / "pids")}
        process = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL)
        try:
            while "READY=1" not in channel.recv(4096).decode():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()
    until(lambda: not list((tmp_path / "state" / "sglang-bw" / "private").iterdir()), what="the key is removed")
