"""The proxy of deploy/haproxy in front of a service: what gRPC's own library can't count by address, it counts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runahead.runtime.wire.parameters import FinishReason
from runahead.v1 import GenerateRequest, GenerationServiceStub, GetModelInfoRequest, TokenizeRequest
from tests.service.fake_engine import TIMEOUT_S
from tests.service.hostile.attacks import ATTACKER
from tests.service.hostile.proxy import CONFIGURATION, HAPROXY, proxied
from tests.service.raw_http2 import END_STREAM, HEADERS, RST_STREAM, SETTINGS, Frame, RawClient
from tests.service.rpc_errors import code, detail, failure
from tests.service.servers.test_below_messages import served

CONNECTIONS: Final = 12  # that the service takes in all

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: `make proxy` does it")


@contextmanager
def client_of(port: int) -> Iterator[grpc.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        yield channel


def ask(port: int) -> str:
    """A call on a connection of its own."""
    with client_of(port) as channel:
        return str(GenerationServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model)


@contextmanager
def many_connections(port: int) -> Iterator[list[RawClient]]:
    """Three times as many as the service takes, of one client, who asks for nothing on them. Those that it keeps."""
    with ExitStack() as opened:
        kept = []
        for _ in range(3 * CONNECTIONS):
            try:
                client = opened.enter_context(RawClient(port, source=ATTACKER))
                client.frames_until(SETTINGS)
                kept.append(client)
            except (EOFError, ConnectionError):
                pass
        yield kept


def test_the_configuration_is_one_that_the_proxy_takes_without_a_warning() -> None:
    assert HAPROXY is not None
    said = subprocess.run([HAPROXY, "-c", "-dW", "-f", str(CONFIGURATION)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr


def test_without_the_proxy_one_client_takes_all_connections_and_with_it_only_its_own(tmp_path: Path) -> None:
    with served(tmp_path, max_connections=CONNECTIONS) as service:
        with many_connections(service.port) as kept:
            assert len(kept) == CONNECTIONS
            assert code(failure(lambda: ask(service.port))) == grpc.StatusCode.UNAVAILABLE
        with (
            proxied(service.port, address_connections=CONNECTIONS // 2) as port,
            many_connections(port) as kept,
        ):
            assert len(kept) == CONNECTIONS // 2
            for _ in range(3):
                assert ask(port) == "fake"


def test_calls_over_the_proxys_limit_are_refused_as_grpc_says_it(tmp_path: Path) -> None:
    with served(tmp_path) as service, proxied(service.port, address_calls=5) as port, client_of(port) as channel:
        stub = GenerationServiceStub(channel)
        for _ in range(5):
            assert stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"
        error = failure(lambda: stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S))
        assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "too many calls from this address"


def answer(port: int, headers: dict[str, str | None]) -> Frame:
    """The first frame of a call that answers it."""
    with RawClient(port) as client:
        stream = client.begin("GetModelInfo", headers)
        client.message(stream, b"", ends=True)
        while (frame := client.next_frame()).kind not in (HEADERS, RST_STREAM) or frame.stream != stream:
            pass
        return frame


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json", "te": None},
        {"content-type": "application/json"},
        {"content-type": "application/grpc-web+proto"},
        {"te": None},
    ],
)
def test_a_call_that_is_not_grpc_gets_415_from_the_proxy(tmp_path: Path, headers: dict[str, str | None]) -> None:
    with served(tmp_path) as service, proxied(service.port) as port:
        assert b"415" in answer(port, headers).payload


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;x=y"])
def test_every_content_type_of_grpc_goes_through_the_proxy(tmp_path: Path, kind: str) -> None:
    with served(tmp_path) as service, proxied(service.port) as port:
        found = answer(port, {"content-type": kind})
        # 0x88 is ":status: 200" in HPACK's static table. Other headers have random hexadecimal digits, such as 415.
        assert found.kind == HEADERS and found.payload[:1] == b"\x88" and not found.flags & END_STREAM, "no refusal"


def test_without_the_proxy_its_stream_is_reset(tmp_path: Path) -> None:
    """Where this fails with another version of gRPC, docs/troubleshooting.md changes with it."""
    with served(tmp_path) as service:
        assert answer(service.port, {"content-type": "application/json", "te": None}).kind == RST_STREAM


def test_calls_go_through_the_proxy_whole(tmp_path: Path) -> None:
    """Streams as they come, errors with their details, cancellation, deadlines, large requests, health."""
    with served(tmp_path) as service, proxied(service.port) as port, client_of(port) as channel:
        stub = GenerationServiceStub(channel)
        stream = stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
        handle = service.engine.next_submit().handle
        assert next(stream).HasField("accepted")
        for token in range(3):
            service.engine.output(handle, [token])
            assert [found.id for found in next(stream).delta.tokens] == [token], "as it comes"
        service.engine.output(handle, [3], FinishReason.LENGTH)
        assert list(stream)[-1].HasField("finished")

        error = failure(lambda: list(stub.Generate(GenerateRequest(), timeout=TIMEOUT_S)))
        assert code(error) == grpc.StatusCode.INVALID_ARGUMENT
        violations = detail(error, error_details_pb2.BadRequest).field_violations
        assert [violation.field for violation in violations] == ["prompt"]

        cancelled = stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
        handle = service.engine.next_submit().handle
        assert next(cancelled).HasField("accepted")
        cancelled.cancel()
        assert service.engine.next_cancel() == handle

        late = stub.Generate(GenerateRequest(text="x"), timeout=0.2)
        assert code(failure(lambda: list(late))) == grpc.StatusCode.DEADLINE_EXCEEDED
        assert service.engine.next_cancel() == service.engine.next_submit().handle

        assert len(stub.Tokenize(TokenizeRequest(text="é" * 400_000), timeout=60).token_ids) == 400_000
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
