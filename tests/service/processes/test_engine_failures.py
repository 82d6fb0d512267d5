"""The real service when something goes wrong in its engine: each stream ends once, and the service with status 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.local_service import LocalService, started_service
from runahead.service.processes.children import ENGINE_MODULE
from runahead.service.settings.server_config import EXIT_BROKEN
from tests.service.rpc_errors import code, detail, failure
from tests.service.service_processes import has_ended, open_streams, running, watched

END_S = 60.0
GENERATION = "runahead.v1.GenerationService"
FLAGS = ["--threads", "1", "--num-blocks", "600", "--launch-timeout-s", "3"]

# Python imports this module in each process of the service. In the engine, a method goes wrong as soon as a file is
# there.
CUSTOMIZED = """
import os, sys

if {engine!r} in sys.orig_argv:
    import threading
    import torch
    from runahead.cuda_graphs.host_device import HostDevice
    from runahead.runtime.engine.loop import Engine

    def out_of_memory():
        raise torch.OutOfMemoryError("tried to allocate so much for the secret of a caller")

    def hang():
        threading.Event().wait()

    def mistake():
        raise ZeroDivisionError("in the midst of the secret of a caller")

    def faulty(method):
        def call(*arguments):
            if os.path.exists({file!r}):
                {fault}()
            return method(*arguments)
        return call

    {owner} = faulty({owner})
"""
LAUNCH, TURN = "HostDevice._run", "Engine.turn"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """As soon as it is there, the fault is."""
    return tmp_path / "now"


@pytest.fixture
def service(
    request: pytest.FixtureRequest, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalService]:
    """Whose engine has a fault to come: where it is, and what."""
    owner, fault = request.param
    customized = CUSTOMIZED.format(engine=ENGINE_MODULE, file=str(file), owner=owner, fault=fault)
    (tmp_path / "sitecustomize.py").write_text(customized)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with started_service(FLAGS) as started:
        yield started


@pytest.mark.parametrize(
    ("service", "reason", "logged"),
    [
        ((LAUNCH, "out_of_memory"), "DEVICE", ["device_failed", "tried to allocate"]),
        ((LAUNCH, "hang"), "DEVICE", ["launch_hung", "in hang"]),
        ((TURN, "mistake"), "INTERNAL", ["engine_failed", "in mistake"]),
    ],
    indirect=["service"],
    ids=["a launch has no memory", "a launch hangs", "the loop has a mistake"],
)
def test_every_stream_ends_once_and_the_service_after_them(
    service: LocalService, file: Path, reason: str, logged: list[str]
) -> None:
    with grpc.insecure_channel(service.url) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest(service=GENERATION), timeout=END_S)
        assert next(watch).status == HealthCheckResponse.SERVING
        calls = open_streams(channel)
        (engine,) = running(service, ENGINE_MODULE)
        with watched(engine) as end:
            file.touch()
            for call in calls:
                events: list[str] = []
                error = failure(lambda: events.extend(event.WhichOneof("event") for event in call))  # noqa: B023
                assert (code(error), detail(error, error_details_pb2.ErrorInfo).reason) == (
                    grpc.StatusCode.UNAVAILABLE,
                    reason,
                )
                assert set(events) <= {"delta"}
                assert "secret" not in str(error.details()), "a caller sees nothing of the engine's inside"
            assert next(watch).status == HealthCheckResponse.NOT_SERVING
            assert service.process.wait(END_S) == EXIT_BROKEN
            assert has_ended(end, END_S)
    log = service.log.read_text(encoding="utf-8")
    for words in logged:
        assert words in log
