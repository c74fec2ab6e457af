from __future__ import annotations

import os
import socket

import pytest

from sglang_bw.errors import PortInUseError
from sglang_bw.launch import port as ports
from tests.launch.serving import free_port


def test_a_free_port_stays_free() -> None:
    port = free_port()
    ports.check_free("127.0.0.1", port)
    ports.check_free("127.0.0.1", port)


@pytest.mark.parametrize(("listening", "wanted"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")])
def test_a_listener_is_found_and_named(listening: str, wanted: str) -> None:
    with socket.create_server((listening, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} .* by pid {os.getpid()}: ") as error:
            ports.check_free(wanted, port)
    assert error.value.exit_code == 33
    suggested = int(error.value.hint.partition("--port ")[2].rstrip("."))
    assert port < suggested
    ports.check_free(wanted, suggested)


def test_a_connection_in_time_wait_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        connection.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    ports.check_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [("no.such.host.invalid", 30000, "is not known"), ("192.0.2.1", 30000, "cannot listen on 192.0.2.1:30000")],
)
def test_an_address_that_is_not_ours(host: str, port: int, message: str) -> None:
    with pytest.raises(PortInUseError, match=message):
        ports.check_free(host, port)


def test_listens_sees_the_own_process_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ports.listens(os.getpid(), port)
        assert not ports.listens(os.getpid(), free_port())
    assert not ports.listens(os.getpid(), port)
    assert not ports.listens(2**22 + 1, port)
