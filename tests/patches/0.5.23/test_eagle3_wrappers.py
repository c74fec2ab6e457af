"""EAGLE-3 captures the target's states when the target is a wrapper around a language model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches import moe_models
from tests.patches.tiny_engine import tiny_engine

WRAPPERS = [moe_models.pixtral, moe_models.intern_vl, moe_models.intern_s1, moe_models.kimi_vl, moe_models.glm4v_moe]
NOT_IMPLEMENTED = pytest.mark.stock_failure(ValueError, r"^Model \w+ does not implement set_eagle3_layers_to_capture")


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


def build(make: Callable[[], moe_models.Built]) -> Any:
    from sglang.srt.runtime_context import get_parallel

    model = moe_models.build(*make())
    for part in (model, getattr(model, "language_model", model)):
        part.pp_group = get_parallel().pp_group
    return model


def capture(model: Any, layer_ids: list[int] | None) -> None:
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        configure_aux_hidden_state_capture,
    )

    try:
        configure_aux_hidden_state_capture(
            model=model,
            eagle_use_aux_hidden_state=True,
            eagle_aux_hidden_state_layer_ids=layer_ids,
            dflash_use_aux_hidden_state=False,
            dflash_target_layer_ids=None,
            is_dspark=False,
        )
    except AttributeError as error:
        # 0.5.22 asks the model without looking first; 0.5.23 says what is missing.
        if error.name != "set_eagle3_layers_to_capture":
            raise
        name = type(model).__name__
        raise ValueError(f"Model {name} does not implement set_eagle3_layers_to_capture, says 0.5.22") from error


@NOT_IMPLEMENTED
@pytest.mark.parametrize("make", WRAPPERS)
@pytest.mark.parametrize(("asked", "captured"), [([0, 1], {0, 1, 2}), ([1], {2}), (None, {2, 1, 0})])
def test_the_language_model_captures(
    make: Callable[[], moe_models.Built], asked: list[int] | None, captured: set[int]
) -> None:
    model = build(make)
    capture(model, asked)
    owner = getattr(model, "language_model", model)
    assert owner.capture_aux_hidden_states
    assert owner.model.layers_to_capture
    assert set(owner.model.layers_to_capture) <= captured


@pytest.mark.parametrize("make", WRAPPERS)
def test_the_draft_gets_the_targets_embedding(make: Callable[[], moe_models.Built]) -> None:
    from sglang.srt.speculative.pp_draft_embedding import resolve_target_embed_and_head

    model = build(make)
    owner = getattr(model, "language_model", model)
    if make is moe_models.glm4v_moe:
        model.lm_head = torch.nn.Linear(1, 1)
    embed, head = resolve_target_embed_and_head(model)
    assert embed is owner.model.embed_tokens.weight
    assert head is owner.lm_head.weight


def test_setting_embedding_and_head_reaches_the_language_model() -> None:
    from sglang.srt.models.internvl import InternVLChatModel

    given = []
    language_model = SimpleNamespace(set_embed_and_head=lambda *both: given.extend(both))
    InternVLChatModel.set_embed_and_head(SimpleNamespace(language_model=language_model), "embed", "head")
    assert given == ["embed", "head"]


def test_a_language_model_that_cannot_capture_is_named() -> None:
    from sglang.srt.models.internvl import InternVLChatModel

    class InternLM2ForCausalLM:
        pass

    model = InternVLChatModel.__new__(InternVLChatModel)
    torch.nn.Module.__init__(model)
    vars(model)["language_model"] = InternLM2ForCausalLM()
    with pytest.raises(ValueError, match="InternLM2ForCausalLM, the language model of InternVLChatModel"):
        capture(model, None)


@NOT_IMPLEMENTED
def test_glm_passes_the_captured_states_to_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(moe_models.glm4v_moe)
    capture(model, [0, 1])
    seen: list[Any] = []
    monkeypatch.setitem(
        vars(sys.modules["sglang.srt.models.glm4v"]),
        "general_mm_embed_routine",
        lambda **_: ("hidden", ["low", "high"]),
    )
    vars(model).update(
        is_mrope_enabled=False, lm_head=None, logits_processor=lambda *given: seen.append((given[1], given[-1]))
    )
    decode = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
    model.forward(torch.zeros(1), torch.zeros(1), decode)
    assert seen == [("hidden", ["low", "high"])]
