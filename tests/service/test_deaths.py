"""The real service on the bundled model, when one of its two processes is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.local_service import LocalService, started_service
from runahead.service.server import EXIT_ENGINE_LOST
from runahead.v1 import GenerateRequest, GenerationServiceStub, StoppingOptions
from tests.service.rpc_errors import code, failure

END_S = 10.0
STREAMS = 3


@pytest.fixture
def service() -> Iterator[LocalService]:
    with started_service(["--threads", "1"]) as running:
        yield running


def open_streams(channel: grpc.Channel) -> list[Any]:
    """Streams that have brought text, and would go on for long."""
    endless = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True))
    calls = [GenerationServiceStub(channel).Generate(endless, timeout=60) for _ in range(STREAMS)]
    for call in calls:
        assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    return calls


def engine_of(service: LocalService) -> int:
    """The process id of the only child of the service."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = path.read_text().rpartition(")")[2].split()[1]
            if int(parent) == service.process.pid:
                children.append(int(path.parent.name))
    (child,) = children
    return child


def test_a_killed_engine_ends_every_stream_once_and_then_the_server(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest(), timeout=60)
        assert next(watch).status == HealthCheckResponse.SERVING
        calls = open_streams(channel)
        os.kill(engine_of(service), signal.SIGKILL)
        for call in calls:
            events: list[str] = []
            error = failure(lambda call=call, events=events: events.extend(e.WhichOneof("event") for e in call))  # type: ignore[misc]
            assert code(error) == grpc.StatusCode.UNAVAILABLE
            assert "finished" not in events
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        assert service.process.wait(END_S) == EXIT_ENGINE_LOST


def test_the_engine_of_a_killed_front_end_goes_away(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel:
        open_streams(channel)
        engine = os.pidfd_open(engine_of(service))
        try:
            service.process.kill()
            ended, _, _ = select.select([engine], [], [], END_S)
        finally:
            os.close(engine)
    assert ended, "the engine runs on"
