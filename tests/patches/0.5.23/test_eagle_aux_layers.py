"""An EAGLE-3 draft gets the target layers that its own config names, or the server does not start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.cpu_package import eagle_arguments, put_stand_in
from tests.patches.tiny_engine import tiny_engine

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


def resolve(folder: Path, **draft: Any) -> Any:
    """Return what the engine resolves for a draft with these keys in its config.json; the target has 8 layers."""
    with pytest.MonkeyPatch.context() as patches:
        put_stand_in(patches)
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
            resolve_spec_aux_hidden_state_config,
        )
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        arguments = eagle_arguments(folder)
        path = Path(arguments["speculative_draft_model_path"]) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | draft))
        server_args = ServerArgs(**arguments)
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        return resolve_spec_aux_hidden_state_config(
            server_args=server_args,
            model_config=ModelConfig.from_server_args(server_args),
            spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE3"),
            is_draft_worker=False,
        )


@pytest.mark.stock_failure(AssertionError, r"^the draft asks for \[1, 3, 4, 6\] and gets None")
def test_ids_at_the_top_of_the_config_are_taken(tmp_path: Path) -> None:
    layers = resolve(tmp_path, **{KEY: [1, 3, 4, 6]}).eagle_aux_hidden_state_layer_ids
    assert layers == [1, 3, 4, 6], f"the draft asks for [1, 3, 4, 6] and gets {layers}"


def test_ids_in_eagle_config_are_taken(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, eagle_config={KEY: [1, 3, 4], "use_aux_hidden_state": True})
    assert resolved.eagle_aux_hidden_state_layer_ids == [1, 3, 4]
    assert resolved.eagle_use_aux_hidden_state


@pytest.mark.parametrize("draft", [{}, {"eagle_config": None}, {"eagle_config": {}}, {"num_aux_hidden_states": 3}])
def test_without_ids_the_target_decides(tmp_path: Path, draft: dict[str, Any]) -> None:
    resolved = resolve(tmp_path, **draft)
    assert resolved.eagle_aux_hidden_state_layer_ids is None
    assert resolved.eagle_use_aux_hidden_state


def test_a_draft_without_auxiliary_states_needs_no_ids(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, eagle_config={"use_aux_hidden_state": False, KEY: []})
    assert not resolved.eagle_use_aux_hidden_state


MALFORMED = {
    "no list": {"eagle_config": {KEY: "1,3,4"}},
    "empty": {"eagle_config": {KEY: []}},
    "text": {"eagle_config": {KEY: [1, "3", 4]}},
    "fraction": {"eagle_config": {KEY: [1, 3.5, 4]}},
    "truth value": {"eagle_config": {KEY: [True, 3, 4]}},
    "negative": {"eagle_config": {KEY: [-1, 3, 4]}},
    "twice": {"eagle_config": {KEY: [1, 3, 3]}},
    "out of order": {"eagle_config": {KEY: [4, 3, 1]}},
    "too deep": {"eagle_config": {KEY: [1, 3, 9]}},
    "another count": {"eagle_config": {KEY: [1, 3, 4]}, "num_aux_hidden_states": 4},
    "a count alone": {"num_aux_hidden_states": 4},
    "no object": {"eagle_config": [1, 3, 4]},
}


@pytest.mark.stock_failure(AssertionError, "^a malformed draft config is taken as")
@pytest.mark.parametrize("draft", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_list_is_an_error(tmp_path: Path, draft: dict[str, Any]) -> None:
    try:
        resolved = resolve(tmp_path, **draft)
    except ValueError as error:
        said = str(error)
    else:
        raise AssertionError(f"a malformed draft config is taken as {resolved.eagle_aux_hidden_state_layer_ids}")
    assert "draft" in said


def test_the_draft_is_built_for_as_many_layers(tmp_path: Path) -> None:
    from sglang.srt.speculative.eagle_aux_layers import get_num_eagle_aux_layers

    assert get_num_eagle_aux_layers(SimpleNamespace(eagle_config={KEY: [1, 3]})) == 2
    assert get_num_eagle_aux_layers(SimpleNamespace(**{KEY: [1, 3, 4, 6]})) == 4
    assert get_num_eagle_aux_layers(SimpleNamespace(num_aux_hidden_states=1)) == 1
    assert get_num_eagle_aux_layers(SimpleNamespace()) == 3


class Target:
    """What a target's own method touches."""

    def __init__(self, layers: int) -> None:
        self.pp_group = SimpleNamespace(is_last_rank=True)
        self.config = SimpleNamespace(num_hidden_layers=layers)
        self.config.text_config = self.config
        self.capture_aux_hidden_states = False
        self.model = SimpleNamespace(layers=[SimpleNamespace() for _ in range(layers)], layers_to_capture=[])
        self.model.set_eagle3_layers_to_capture = lambda ids: setattr(self.model, "layers_to_capture", ids)


OUTPUTS = [1, 30, 58]
INPUTS = [2, 30, 58]
SHIFTED, SHIFTED_INPUTS = [2, 31, 59], [3, 31, 59]
# (module, class): captured for OUTPUTS, for INPUTS, and for a draft that names none, of a target with 62 layers.
# Layer i is captured where it begins, so what layer i - 1 puts out is captured at i.
FAMILIES = {
    ("llama", "LlamaForCausalLM"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("qwen3", "Qwen3ForCausalLM"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("qwen3_moe", "Qwen3MoeForCausalLM"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("glm4_moe", "Glm4MoeForCausalLM"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("glm5_next", "Glm5NextForConditionalGeneration"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("minimax_m2", "MiniMaxM2ForCausalLM"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("minimax_m3", "MiniMaxM3SparseForCausalLM"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"): (SHIFTED, SHIFTED_INPUTS, [3, 32, 60]),
    ("gpt_oss", "GptOssForCausalLM"): (SHIFTED, SHIFTED_INPUTS, [2, 31, 59]),
    ("deepseek_v2", "DeepseekV3ForCausalLM"): (SHIFTED, INPUTS, [2, 31, 59]),
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"): (SHIFTED, INPUTS, [2, 31, 59]),
}


@pytest.mark.parametrize(("module", "name"), FAMILIES)
def test_each_family_captures_these(module: str, name: str) -> None:
    import importlib

    outputs, inputs, default = FAMILIES[module, name]
    method: Callable[..., None] = getattr(
        importlib.import_module(f"sglang.srt.models.{module}"), name
    ).set_eagle3_layers_to_capture
    for asked, captured in ((OUTPUTS, outputs), (INPUTS, inputs), (None, default)):
        target = Target(62)
        method(target, asked)
        assert (asked, target.model.layers_to_capture) == (asked, captured)
        assert target.capture_aux_hidden_states


@pytest.mark.parametrize(("asked", "captured"), [(OUTPUTS, SHIFTED), (INPUTS, INPUTS), (None, [2, 31, 59])])
def test_kimi_hands_the_ids_to_its_deepseek(asked: list[int] | None, captured: list[int]) -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration

    language_model = Target(62)
    language_model.set_eagle3_layers_to_capture = lambda ids: DeepseekV3ForCausalLM.set_eagle3_layers_to_capture(
        language_model, ids
    )
    KimiK25ForConditionalGeneration.set_eagle3_layers_to_capture(SimpleNamespace(language_model=language_model), asked)
    assert language_model.model.layers_to_capture == captured


@pytest.mark.stock_failure(AssertionError, r"^the fc layer takes 3 states, the draft names 4 layers")
def test_the_fc_layer_of_a_llama_draft_is_as_wide(tmp_path: Path) -> None:
    from sglang.srt.models.llama_eagle3 import LlamaModel
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        **{KEY: [1, 3, 4, 6]},
    )
    states = LlamaModel(config).fc.in_features // 64
    assert states == 4, f"the fc layer takes {states} states, the draft names 4 layers"
