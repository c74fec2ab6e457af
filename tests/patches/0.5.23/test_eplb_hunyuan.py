"""EPLB, redundant experts and expert recording work for Hunyuan V3 and V4."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.patches import moe_models
from tests.patches.eplb import check_dispatch, check_rebalance, redundant_experts  # noqa: F401
from tests.patches.tiny_engine import tiny_engine

HUNYUAN = [moe_models.hunyuan_v3, moe_models.hunyuan_v4]
NO_LOCATIONS = pytest.mark.stock_failure(AssertionError, "^Expert dispatch requires placement metadata")


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


@NO_LOCATIONS
@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.parametrize("make", HUNYUAN)
def test_the_router_finds_the_experts(make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch) -> None:
    check_dispatch(make, monkeypatch)


@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.parametrize("make", HUNYUAN)
def test_weights_follow_the_new_locations(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rebalance(make, monkeypatch)


class Layer(torch.nn.Module):
    """Notes which layer the recorder thinks is running."""

    def __init__(self, seen: list[int | None], recorder: SimpleNamespace, returned: tuple[object, object]) -> None:
        super().__init__()
        self.seen, self.recorder, self.returned = seen, recorder, returned

    def forward(self, *_: object) -> tuple[object, object]:
        self.seen.append(self.recorder.layer)
        return self.returned


@pytest.mark.stock_failure(AssertionError, r"^the recorder saw \[None, None, None\]")
@pytest.mark.parametrize("make", HUNYUAN)
def test_the_recorder_knows_the_layer(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from sglang.srt.eplb import expert_distribution

    recorder = SimpleNamespace(layer=None)

    @contextlib.contextmanager
    def with_current_layer(layer_id: int) -> Iterator[None]:
        recorder.layer = layer_id
        yield
        recorder.layer = None

    recorder.with_current_layer = with_current_layer
    before = expert_distribution.get_global_expert_distribution_recorder()
    request.addfinalizer(lambda: expert_distribution.set_global_expert_distribution_recorder(before))
    expert_distribution.set_global_expert_distribution_recorder(recorder)
    model = moe_models.build(*make()).model
    seen: list[int | None] = []
    hidden = torch.zeros(1, 64)
    model.layers = torch.nn.ModuleList(Layer(seen, recorder, (hidden, None)) for _ in range(moe_models.LAYERS))
    with contextlib.suppress(StopForwardError):
        model.norm = model._head_norm = Stop()
        module = sys.modules[type(model).__module__]
        batch = SimpleNamespace(start=lambda _: None, final_norm=lambda *_: Stop()())
        monkeypatch.setattr(module, "residual_batch", batch, raising=False)
        share = SimpleNamespace(topk_indices=None, update=lambda _: None, publish=lambda: None)
        monkeypatch.setattr(module, "IndexTopKShareState", lambda *_: share, raising=False)
        model(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), None, input_embeds=hidden)
    assert seen == [0, 1, 2], f"the recorder saw {seen}"


class StopForwardError(Exception):
    """After the layers nothing matters."""


class Stop(torch.nn.Module):
    def forward(self, *_: object) -> None:
        raise StopForwardError
