"""No log, endpoint or dump shows the keys and passwords that the server was started with."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.tiny_engine import tiny_engine

KEY, ADMIN_KEY, PASSWORD = "key-of-the-server", "key-of-the-admin", "password-of-the-file"
SECRETS = {"api_key": KEY, "admin_api_key": ADMIN_KEY, "ssl_keyfile_password": PASSWORD}
SHOWN = pytest.mark.stock_failure(AssertionError, "^shown: key-of-the-server")


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("model")
    files = {"ssl_keyfile": str(folder / "key.pem"), "ssl_certfile": str(folder / "cert.pem")}
    for file in files.values():
        Path(file).touch()
    with tiny_engine(folder, **SECRETS, **files):
        yield


def server_args() -> Any:
    from sglang.srt.runtime_context import get_context

    return get_context().server_args


def check_hidden(text: str, marks: int = len(SECRETS)) -> None:
    shown = [secret for secret in SECRETS.values() if secret in text]
    assert not shown, f"shown: {', '.join(shown)}"
    assert text.count("<redacted>") >= marks


@SHOWN
def test_the_log_at_the_start() -> None:
    from sglang.srt.entrypoints.engine import _server_args_for_logging

    check_hidden(f"server_args={_server_args_for_logging(server_args())}")


@SHOWN
def test_server_info(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints import http_server

    async def internal_state() -> list[dict[str, Any]]:
        return [server_args().resolved_dict()]

    manager = SimpleNamespace(server_args=server_args(), get_internal_state=internal_state, startup_time=1.0)
    state = SimpleNamespace(tokenizer_manager=manager, scheduler_info={"status": "ready"})
    monkeypatch.setattr(http_server, "_global_state", state)
    answer = asyncio.run(http_server.server_info())
    assert answer["status"] == "ready"
    assert answer["model_path"] == server_args().model_path
    check_hidden(json.dumps(answer, default=str))


@SHOWN
def test_the_schedulers_internal_state() -> None:
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    contributions = {
        name: lambda _: None for name in vars(SchedulerInternalStateController) if name.startswith("_add_")
    }
    answer = SchedulerInternalStateController.get_internal_state(SimpleNamespace(**contributions), None)
    check_hidden(json.dumps(answer.internal_state, default=str))


@pytest.fixture
def launch_server_info() -> Any:
    from sglang.srt.rust_server import config

    if not hasattr(config, "_launch_server_info"):
        pytest.skip("the Rust server of 0.5.22 is told no server arguments")
    return config._launch_server_info


@SHOWN
def test_the_rust_server_answers(launch_server_info: Any) -> None:
    scheduler = SimpleNamespace(max_total_num_tokens=1, max_req_input_len=1, server_args=server_args())
    check_hidden(launch_server_info(scheduler))


@SHOWN
def test_the_pickled_dump(tmp_path: Path) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    manager = SimpleNamespace(server_args=server_args())
    dumped = TokenizerManager._server_args_for_dump(manager)
    assert type(dumped) is type(server_args())
    check_hidden(pickle.dumps(dumped).decode("latin-1"), marks=1)  # a pickle holds a repeated text once
    restored = pickle.loads(pickle.dumps(dumped))
    assert (restored.api_key, restored.model_path) == ("<redacted>", server_args().model_path)
    assert server_args().api_key == KEY


@SHOWN
def test_the_representation() -> None:
    check_hidden(repr(server_args()))


@SHOWN
@pytest.mark.parametrize("form", ["--api-key {}", "--api-key={}", "--api-k {}", "--api={}"])
def test_the_launch_command(form: str) -> None:
    from sglang.srt.sampling.watermarking.core import redact_watermark_command_line

    given = f"--model-path m {form.format(KEY)} --admin-api-key {ADMIN_KEY} --ssl-keyfile-password={PASSWORD} --tp 2"
    shown = redact_watermark_command_line(given.split(), None)
    check_hidden(shown)
    assert shown.startswith("--model-path m --api")
    assert shown.endswith("--tp 2")


def test_the_key_files_name_stays() -> None:
    from sglang.srt.sampling.watermarking.core import redact_watermark_command_line

    assert redact_watermark_command_line(["--ssl-keyfile", "a.pem"], None) == "--ssl-keyfile a.pem"


def test_the_engine_call() -> None:
    from sglang.srt.sampling.watermarking.core import redact_watermark_secrets

    assert redact_watermark_secrets({"api_key": KEY, "tp_size": 2}) == {"api_key": "<redacted>", "tp_size": 2}
    assert redact_watermark_secrets({"api_key": None}) == {"api_key": None}
