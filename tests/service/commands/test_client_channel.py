"""How the command line's client reaches a server: never by way of a proxy to its own machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runahead.runtime.wire.parameters import FinishReason
from runahead.service import cli
from runahead.service.calls.admission import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.servers.supervised import Security
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.running_service import Service

TOKEN = "alice-token-0123456789"


@contextmanager
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """The address of an HTTP proxy that hangs up, and how each connection to it began."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(4096))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "dns:///localhost"])
def test_a_token_for_this_machine_does_not_go_to_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "callers").write_text(f"alice generate token {TOKEN}\n")
    for name in ("grpc_proxy", "https_proxy", "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "engine.sock"
    security = Security(Access(CallersFile(tmp_path / "callers")), None)
    with proxy() as (address, asked), Service(FakeEngine(path), path, security=security) as service:
        monkeypatch.setenv("http_proxy", address)
        answer = threading.Thread(
            target=lambda: service.engine.output(service.engine.next_submit().handle, [72], FinishReason.LENGTH)
        )
        answer.start()
        url = f"{host}:{service.port}"
        assert cli.main(["generate", "x", "--url", url, "--token-file", str(tmp_path / "token")]) == 0
        answer.join(TIMEOUT_S)
        assert not asked
        assert cli.main(["generate", "x", "--url", "example.invalid:1"]) == 1
        assert asked[0].startswith(b"CONNECT example.invalid:1 "), "another machine is reached through it"
