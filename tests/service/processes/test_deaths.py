"""The real service on the bundled model, when one of its processes is killed, or stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.local_service import LocalService, started_service
from runahead.service.processes.children import ENGINE_MODULE, FRONT_END_MODULE, SIDE_MODULE
from runahead.service.settings.server_config import EXIT_BROKEN
from runahead.v1 import GenerateOnceRequest, GenerationServiceStub, SamplingOptions, StatsRequest
from tests.service.rpc_errors import code, detail, failure
from tests.service.service_processes import engine_of, has_ended, open_streams, running, watched

END_S = 30.0
GENERATION = "runahead.v1.GenerationService"
LAUNCH_TIMEOUT_S = 3.0
FLAGS = ["--threads", "1", "--num-blocks", "600", "--launch-timeout-s", str(LAUNCH_TIMEOUT_S)]


@pytest.fixture
def service() -> Iterator[LocalService]:
    with started_service(FLAGS) as started:
        yield started


def check_ended_once(calls: list[grpc.Call]) -> None:
    for call in calls:
        events: list[str] = []
        error = failure(lambda call=call, events=events: events.extend(e.WhichOneof("event") for e in call))  # type: ignore[misc]
        assert code(error) == grpc.StatusCode.UNAVAILABLE
        assert "finished" not in events


def test_a_killed_engine_ends_every_stream_once_and_then_the_server(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest(), timeout=60)
        assert next(watch).status == HealthCheckResponse.SERVING
        calls = open_streams(channel)
        os.kill(engine_of(service), signal.SIGKILL)
        check_ended_once(calls)
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        assert service.process.wait(END_S) == EXIT_BROKEN


def test_a_service_that_is_killed_again_and_again_serves_at_each_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same port. Of two processes that are killed at once, the folder of their socket stays until then."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    port, tokens = 0, list[list[int]]()
    for number in range(3):
        with started_service(FLAGS, port=port) as service, contextlib.ExitStack() as stack:
            port = service.ports["service"]
            assert len(list(tmp_path.glob("runahead-engine-*"))) == 1, "its own"
            channel = stack.enter_context(grpc.insecure_channel(service.url))
            request = GenerateOnceRequest(text="def f(", sampling=SamplingOptions(temperature=0.0))
            whole = GenerationServiceStub(channel).GenerateOnce(request, timeout=60)
            tokens.append([token.id for token in whole.tokens])
            calls = open_streams(channel)
            modules = (ENGINE_MODULE, FRONT_END_MODULE, SIDE_MODULE)
            processes = [process for module in modules for process in running(service, module)]
            assert len(processes) == len(modules)
            ends = [stack.enter_context(watched(process)) for process in processes]
            if number < 2:  # so that neither takes the folder away after the other's death
                service.process.send_signal(signal.SIGSTOP)
                os.kill(processes[0], signal.SIGKILL)
            service.process.kill()
            check_ended_once(calls)
            assert all(has_ended(end, END_S) for end in ends)
            service.process.wait(END_S)
            assert len(list(tmp_path.glob("runahead-engine-*"))) == (number < 2)
    assert tokens == [tokens[0]] * 3 and tokens[0]


def test_the_engine_of_a_killed_front_end_goes_away(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel, watched(engine_of(service)) as engine:
        open_streams(channel)
        service.process.kill()
        assert has_ended(engine, END_S), "the engine runs on"


def test_a_stopped_engine_that_comes_back_is_serving_again_and_its_streams_go_on(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest(service=GENERATION), timeout=60)
        assert next(watch).status == HealthCheckResponse.SERVING
        calls = open_streams(channel, max_tokens=300)
        os.kill(engine_of(service), signal.SIGSTOP)
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        error = failure(lambda: GenerationServiceStub(channel).Stats(StatsRequest(), timeout=END_S))
        assert detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_SILENT"
        os.kill(engine_of(service), signal.SIGCONT)
        assert next(watch).status == HealthCheckResponse.SERVING
        assert [list(call)[-1].WhichOneof("event") for call in calls] == ["finished"] * len(calls)


def test_a_stopped_engine_that_does_not_come_back_ends_every_stream_once_and_then_the_server(
    service: LocalService,
) -> None:
    with grpc.insecure_channel(service.url) as channel, watched(engine_of(service)) as engine:
        calls = open_streams(channel)
        os.kill(engine_of(service), signal.SIGSTOP)
        check_ended_once(calls)
        assert service.process.wait(END_S) == EXIT_BROKEN
        assert has_ended(engine, END_S)
    assert b"engine_stuck" in service.log.read_bytes()
