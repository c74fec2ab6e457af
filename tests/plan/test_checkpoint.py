from __future__ import annotations

import http.server
import json
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_bw.errors import CheckpointError
from sglang_bw.plan import checkpoint, headers, kept
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.inventory import Role, take
from tests.plan import synthetic

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def llama() -> Iterator[synthetic.Entry]:
    yield from synthetic.bf16("model.embed_tokens", 512, 64)
    yield from synthetic.bf16("lm_head", 512, 64)
    for layer in range(2):
        name = f"model.layers.{layer}"
        yield from synthetic.bf16(f"{name}.self_attn.q_proj", 64, 64)
        yield from synthetic.bf16(f"{name}.self_attn.k_proj", 16, 64)
        yield from synthetic.bf16(f"{name}.self_attn.v_proj", 16, 64)
        yield from synthetic.bf16(f"{name}.self_attn.o_proj", 64, 64)
        yield from synthetic.mlp(f"{name}.mlp", 64, 128, synthetic.bf16, synthetic.GLU)
        yield from synthetic.bf16(f"{name}.input_layernorm", 64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synthetic.write(tmp_path / "model", LLAMA, llama(), shards=2)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        pytest.param({"rope_type": "linear", "factor": 4.0}, 4096, id="factor"),
        pytest.param({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256}, 1024, id="stated"),
        pytest.param({"rope_type": "llama3", "factor": 8.0}, 1024, id="llama3"),
        pytest.param({"rope_type": "linear", "factor": "4"}, 1024, id="no number"),
        pytest.param(None, 1024, id="none"),
    ],
)
def test_the_longest_request_is_what_the_engine_derives(scaling: dict[str, Any] | None, context: int) -> None:
    assert read_shape({**LLAMA, "rope_scaling": scaling}).context == context


def test_headers_of_a_directory(model: Path) -> None:
    read = checkpoint.read(str(model))
    elements = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 128 + 64)
    assert read.inventory.total() == 2 * elements
    assert read.origin == f"headers in {model}"
    assert "planned from its header" in read.notes[0]
    assert checkpoint.read(str(model)) == read  # from the cache


def test_a_file_that_changed_is_read_again(model: Path) -> None:
    before = checkpoint.read(str(model)).inventory.total()
    synthetic.write(model, LLAMA, [*llama(), *synthetic.bf16("model.more.gate_proj", 1024, 64)], shards=2)
    assert checkpoint.read(str(model)).inventory.total() == before + 2 * 1024 * 64


def test_config_alone_is_an_estimate(model: Path) -> None:
    measured = checkpoint.read(str(model)).inventory
    for shard in model.glob("*.safetensors*"):
        shard.unlink()
    read = checkpoint.read(str(model))
    assert (read.inventory.measured, read.origin) == (False, "config.json")
    assert read.inventory.total() == pytest.approx(measured.total(), rel=0.01)
    assert checkpoint.read(str(model / "config.json")).inventory == read.inventory


def test_missing_shards_are_an_estimate_and_a_note(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").unlink()
    read = checkpoint.read(str(model))
    assert not read.inventory.measured
    assert read.notes == ("1 of 2 shards are here: weights are estimated from config.json",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "header of .* is cut off"),
        (lambda data: data[:5], "no safetensors file"),
        (lambda data: b"", "no safetensors file"),
        (lambda data: struct.pack("<Q", 1 << 40) + data[8:], "no safetensors file"),
        (lambda data: data[:8] + b"x" * (len(data) - 8), "not valid JSON"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (lambda data: data.replace(b"BF16", b"BOOL", 1), "which is not the .* bytes"),
        (lambda data: data.replace(b'"shape": [512,', b'"shape": [-12,', 1), "is damaged"),
        (lambda data: data.replace(b'"data_offsets"', b'"data_offsetz"', 1), "is damaged"),
    ],
)
def test_damaged_headers(model: Path, damage: Any, message: str) -> None:
    shard = model / "model-00001-of-00002.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint.read(str(model))
    assert raised.value.exit_code == 56
    assert raised.value.hint


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/at/all", "cannot be read"),
        ("just-a-name", "neither a directory nor a hub id"),
        ("owner/name", "not in the hub's cache"),
        ("", "neither a directory"),
    ],
)
def test_sources_that_are_none(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint.read(source)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size or n_embd or d_model is missing"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers is nan"),
        ({"num_attention_heads": -8}, "num_attention_heads is -8"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"architectures": []}, "architectures is missing"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"intermediate_size": 1 << 60}, "intermediate_size is"),
    ],
)
def test_configurations_that_say_too_little(model: Path, change: dict[str, Any], message: str) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoint.read(str(model))


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", '"text"', "{}"])
def test_configurations_that_are_none(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.read(str(model))
    assert raised.value.hint


def test_the_hub_cache_is_used(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "hub" / "models--owner--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc123")
    (root / "snapshots").mkdir()
    (root / "snapshots" / "abc123").symlink_to(model)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    read = checkpoint.read("owner/name")
    assert read.inventory.measured
    assert read.name == "owner/name"
    assert checkpoint.read("owner/name", revision="abc123").inventory == read.inventory


@contextmanager
def hub(folder: Path, *, ranges: bool = True, status: int = 0) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """A hub with one model; yields its address and what it sent: path and bytes."""
    sent: list[tuple[str, int]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = folder / self.path.rsplit("/", 1)[-1]
            if status or not path.is_file():
                self.send_error(status or 404)
                return
            data, code = path.read_bytes(), 200
            if ranges and (match := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))):
                data, code = data[int(match[1]) : int(match[2]) + 1], 206
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                sent.append((path.name, len(data)))
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole-files"])
def test_headers_from_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    for shard in model.glob("*.safetensors"):  # what follows the header must not be read
        with shard.open("ab") as file:
            file.truncate(shard.stat().st_size + 3_000_000)
    seen = []
    with hub(model, ranges=ranges) as (address, sent):
        monkeypatch.setenv("HF_ENDPOINT", address)
        read = checkpoint.read("owner/name", fetch=True, progress=lambda done, total: seen.append((done, total)))
        if ranges:
            assert sum(size for _, size in sent) < 1_000_000
    assert read.inventory == checkpoint.read(str(model)).inventory
    assert seen == [(1, 2), (2, 2)]
    # The hub is gone, and not asked again.
    assert checkpoint.read("owner/name").inventory == read.inventory


def test_a_long_header_takes_a_second_range(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = [entry for number in range(9000) for entry in synthetic.bf16(f"model.layers.0.extra.{number}", 8, 8)]
    synthetic.write(model, LLAMA, [*llama(), *extra], shards=1)
    with hub(model) as (address, sent):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert checkpoint.read("owner/name", fetch=True).inventory == checkpoint.read(str(model)).inventory
        assert len([path for path, _ in sent if path.endswith(".safetensors")]) == 2


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "has no owner/name"), (401, "does not show"), (403, "does not show"), (503, "answers 503")],
)
def test_a_hub_that_refuses(model: Path, monkeypatch: pytest.MonkeyPatch, status: int, message: str) -> None:
    with hub(model, status=status) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        with pytest.raises(CheckpointError, match=message) as raised:
            checkpoint.read("owner/name", fetch=True)
    assert raised.value.hint


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "no address", "https://"])
def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(CheckpointError, match="cannot be reached") as raised:
        checkpoint.read("owner/name", fetch=True)
    assert "HF_ENDPOINT" in raised.value.hint


def test_offline_means_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        checkpoint.read("owner/name", fetch=True)


def test_a_damaged_cache_is_no_cache(model: Path) -> None:
    read = checkpoint.read(str(model))
    for path in (Path(kept._path("x")).parent).glob("*.json"):
        path.write_text('{"slots": [["model", "no such role", 1, 2]], "more": {}}')
    assert checkpoint.read(str(model)) == read


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_clear_error(data: bytes) -> None:
    with suppress(CheckpointError):
        length = headers.header_length(data, "file")
        headers.parse_header(data[8:], length, "file")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*LLAMA, "num_experts", "moe_intermediate_size", "kv_lora_rank", "layer_types", "vision_config", "text_config",
          "quantization_config", "linear_attn_config", "linear_num_value_heads", "index_topk", "index_topk_pattern",
          "first_k_dense_replace", "decoder_sparse_step", "head_dim", "mlp_only_layers"]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=200)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_configuration_is_read_or_a_clear_error(change: dict[str, Any]) -> None:
    from sglang_bw.plan.config import read_shape

    with suppress(CheckpointError):
        shape = read_shape({**LLAMA, **change})
        assert shape.layers >= 1
        assert checkpoint.estimate(shape).total() >= 0


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.1.mlp.experts.7.down_proj.weight_packed", Role.EXPERT),
        ("model.layers.1.mlp.experts.gate_up_proj", Role.EXPERT),
        ("model.layers.1.block_sparse_moe.experts.3.w2.weight_scale_inv", Role.EXPERT),
        ("model.layers.1.mlp.shared_expert.up_proj.weight", Role.SHARED),
        ("model.layers.1.mlp.shared_expert_gate.weight", Role.WHOLE),
        ("model.layers.1.mlp.gate.weight", Role.WHOLE),
        ("model.layers.1.mlp.gate.e_score_correction_bias", Role.WHOLE),
        ("model.layers.1.mlp.gate_proj.weight", Role.DENSE),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", Role.WHOLE_ATTENTION),
        ("model.layers.1.self_attn.indexer.wq_b.weight", Role.WHOLE_ATTENTION),
        ("model.layers.1.self_attn.kv_b_proj.weight_scale_inv", Role.LATENT_UP),
        ("model.layers.1.self_attn.q_a_layernorm.weight", Role.WHOLE),
        ("model.layers.1.self_attn.q_norm.weight", Role.WHOLE),
        ("model.layers.1.self_attn.k_proj.bias", Role.KV_HEADS),
        ("model.layers.1.linear_attn.A_log", Role.LINEAR),
        ("model.visual.blocks.3.attn.qkv.weight", Role.VISION),
        ("vision_tower.encoder.blocks.3.mlp.fc0.weight", Role.WHOLE_VISION),
        ("vision_tower.encoder.layers.30.mlp.fc0.weight", Role.WHOLE_VISION),
        ("midlayer.self_attn.q_proj.weight", Role.HEADS),
        ("fc.weight", Role.WHOLE),
        ("d2t", Role.WHOLE),
        ("lm_head.weight", Role.HEAD),
        ("language_model.lm_head.weight", Role.HEAD),
        ("transformer.wte.weight", Role.EMBEDDING),
    ],
)
def test_roles(name: str, role: Role) -> None:
    (slot,) = take([headers.Tensor(name, "BF16", (8, 8), 128)], layers=4).bytes
    assert slot.role is role
    assert slot.part == "model"


@pytest.mark.parametrize(
    "name", ["mtp.layers.0.mlp.experts.1.up_proj.weight", "model.layers.4.eh_proj.weight", "model.mtp.fc.weight"]
)
def test_the_mtp_head_is_told_apart(name: str) -> None:
    (slot,) = take([headers.Tensor(name, "BF16", (8, 8), 128)], layers=4).bytes
    assert slot.part == "mtp"
