"""The port is one service's, also before it listens, and also where its front ends share it."""

from __future__ import annotations

import socket

import pytest

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.processes.ports import Port


def reserve(number: int, shared: bool) -> Port:
    return Port.reserve("127.0.0.1", number, shared=shared, spelling=str)


def listener(number: int) -> socket.socket:
    """As a front end has one, of several."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", number))
    sock.listen()
    return sock


@pytest.mark.parametrize("first", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("second", [False, True], ids=["alone", "shared"])
def test_a_port_that_is_reserved_is_nobody_else_s_before_anybody_listens(first: bool, second: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    mine = reserve(number, first)
    with pytest.raises(ConfigError, match=f"127.0.0.1 port {number} can't be listened on: Address already in use"):
        reserve(number, second)
    mine.close()
    mine.close()
    reserve(number, second).close()


def test_any_port_is_one_number_for_all_front_ends_and_no_connection_is_lost_on_the_way() -> None:
    port = reserve(0, shared=True)
    assert port.number
    with listener(port.number), listener(port.number):
        for _ in range(20):
            socket.create_connection(("127.0.0.1", port.number), timeout=10).close()
        with pytest.raises(ConfigError, match="already in use"):
            reserve(port.number, shared=True)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number), timeout=10)
    port.close()


def test_somebody_who_listens_without_a_lock_is_seen_too() -> None:
    with listener(0) as other, pytest.raises(ConfigError, match="Address already in use"):
        reserve(other.getsockname()[1], shared=True)


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"can't be listened on: [^;]*$"):
        Port.reserve("no.such.host.invalid", 1, shared=False, spelling=str)
