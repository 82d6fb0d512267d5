"""The metrics port: who connects to it and says nothing, or too little, keeps nobody out."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from runahead.service.shared_memory.board import Board
from runahead.service.stats.metrics_server import MetricsServer, ServiceCollector
from tests.service.fake_engine import TIMEOUT_S


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    running = MetricsServer("127.0.0.1", 0, ServiceCollector(Board(1), "0.1.0", lambda: None))
    yield running
    running.close()


def page(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=TIMEOUT_S) as response:
        return str(response.read().decode())


def test_connections_that_say_nothing_are_bounded_and_give_their_places_back(server: MetricsServer) -> None:
    address = ("127.0.0.1", server.port)
    idle = [socket.create_connection(address, TIMEOUT_S) for _ in range(16)]
    with socket.create_connection(address, TIMEOUT_S) as one_more:
        assert one_more.recv(1) == b"", "closed at once"
    for connection in idle:
        connection.close()
    while True:  # until their threads have seen it
        try:
            assert "runahead_info" in page(server)
            return
        except OSError:
            continue


def test_a_connection_ends_in_time_whatever_it_says_meanwhile(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runahead.service.stats.metrics_server._WHOLE_S", 0.5, raising=False)
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as slow:
        slow.settimeout(0.05)
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        for line in range(200):  # fewer than may be in a header would take
            try:
                slow.sendall(b"X-%d: y\r\n" % (line % 50))
                ended = slow.recv(1) == b""
                break
            except TimeoutError:
                continue
            except OSError:
                ended = True
                break
        else:
            ended = False
    assert ended
    assert "runahead_info" in page(server)


def test_a_place_comes_back_when_there_is_no_thread_for_it(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[object]()

    def start(self: threading.Thread) -> None:
        refused.append(self)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as connection:
                assert connection.recv(1) == b""
    assert len(refused) == 20, "each had a place"
    assert "runahead_info" in page(server)
