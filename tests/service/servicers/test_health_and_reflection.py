"""Health with Check, List and Watch; reflection in both versions, from Python and from buf curl."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.errors import ServiceError
from runahead.service.engine.request_stream import StalledReaderError
from runahead.service.servicers.health import HealthServicer
from runahead.v1 import GenerateRequest
from tests.service.fake_engine import TIMEOUT_S
from tests.service.health_statuses import health_statuses
from tests.service.rpc_errors import code, failure
from tests.service.running_service import Service

GENERATION = "runahead.v1.GenerationService"
BUF = Path(sys.executable).with_name("buf")
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def test_health_is_serving_for_the_server_and_for_its_service(service: Service) -> None:
    health = HealthStub(service.channel)
    for name in ("", GENERATION):
        assert health.Check(HealthCheckRequest(service=name), timeout=TIMEOUT_S).status == SERVING
    assert health_statuses(service.channel) == {"": SERVING, GENERATION: SERVING}


def test_an_unknown_service_is_not_found_and_can_be_watched(service: Service) -> None:
    health = HealthStub(service.channel)
    error = failure(lambda: health.Check(HealthCheckRequest(service="nobody"), timeout=TIMEOUT_S))
    assert code(error) == grpc.StatusCode.NOT_FOUND
    watch = health.Watch(HealthCheckRequest(service="nobody"), timeout=TIMEOUT_S)
    assert next(watch).status == HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_a_watcher_is_told_when_the_engine_is_lost_and_checks_answer_on(service: Service) -> None:
    health = HealthStub(service.channel)
    watch = health.Watch(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S)
    assert next(watch).status == SERVING
    service.call(service.front_end.engine_lost)
    assert next(watch).status == NOT_SERVING
    assert health.Check(HealthCheckRequest(), timeout=TIMEOUT_S).status == NOT_SERVING


def test_an_open_watch_does_not_hold_a_graceful_stop(service: Service) -> None:
    watch = HealthStub(service.channel).Watch(HealthCheckRequest(service=GENERATION), timeout=60)
    assert next(watch).status == SERVING
    service.stop(grace_s=60)
    assert [answer.status for answer in watch] == [NOT_SERVING]
    service._thread.join(TIMEOUT_S)
    assert not service._thread.is_alive()


def test_a_server_that_drains_lives_and_is_not_ready(service: Service) -> None:
    health = HealthStub(service.channel)
    stream = service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    next(stream)
    watches = {name: health.Watch(HealthCheckRequest(service=name), timeout=TIMEOUT_S) for name in ("", GENERATION)}
    assert [next(watch).status for watch in watches.values()] == [SERVING, SERVING]
    service.stop(grace_s=60)
    assert [answer.status for answer in watches[GENERATION]] == [NOT_SERVING]
    assert [answer.status for answer in watches[""]] == [], "it ends, too, and says nothing new"
    assert health_statuses(service.channel) == {"": SERVING, GENERATION: NOT_SERVING}
    late = health.Watch(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S)
    assert [answer.status for answer in late] == [NOT_SERVING]
    service.engine.output(handle, [1], FinishReason.LENGTH)
    assert list(stream)[-1].HasField("finished")


def reflect(service: Service, version: str, request: ServerReflectionRequest) -> ServerReflectionResponse:
    method = service.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )
    return next(method(iter([request]), timeout=TIMEOUT_S))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_every_service_and_can_describe_each(service: Service, version: str) -> None:
    answer = reflect(service, version, ServerReflectionRequest(list_services=""))
    names = [entry.name for entry in answer.list_services_response.service]
    assert set(names) == {
        GENERATION,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for name in names:
        answer = reflect(service, version, ServerReflectionRequest(file_containing_symbol=name))
        described: set[str] = set()
        for serialized in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
            described |= {f"{file.package}.{found.name}" for found in file.service}
        assert name in described


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (GENERATION, "runahead/v1/generation_service.proto"),
        (f"{GENERATION}.Abort", "runahead/v1/generation_service.proto"),
        ("runahead.v1.AbortRequest", "runahead/v1/control.proto"),
        ("google.rpc.BadRequest", "google/rpc/error_details.proto"),
    ],
    ids=["service", "method", "message", "detail of an error"],
)
def test_reflection_finds_services_methods_messages_and_the_details_of_errors(
    service: Service, version: str, symbol: str, file: str
) -> None:
    answer = reflect(service, version, ServerReflectionRequest(file_containing_symbol=symbol))
    first, *_ = answer.file_descriptor_response.file_descriptor_proto
    assert descriptor_pb2.FileDescriptorProto.FromString(first).name == file


@pytest.mark.parametrize("symbol", [f"{GENERATION}.Nothing", "runahead.v1.Nothing", ""])
def test_reflection_says_that_a_symbol_is_not_known(service: Service, symbol: str) -> None:
    answer = reflect(service, "v1", ServerReflectionRequest(file_containing_symbol=symbol))
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")
@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_buf_curl_calls_the_service_by_reflection(service: Service, version: str) -> None:
    def curl(method: str, data: dict[str, object]) -> str:
        command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(data)]
        command += ["--reflect-protocol", f"grpc-{version}"]
        command.append(f"http://127.0.0.1:{service.port}/{GENERATION}/{method}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    assert json.loads(curl("GetModelInfo", {}))["model"] == "fake"
    assert "sampling.top_p" in curl("Generate", {"text": "x", "sampling": {"topP": 2}})


class Unread:
    """A call whose client takes headers, and no message."""

    async def send_initial_metadata(self, headers: object) -> None:
        pass

    async def write(self, message: object) -> None:
        await asyncio.Event().wait()


def test_watchers_of_health_are_bounded_and_those_that_nobody_reads_end() -> None:
    async def watched() -> None:
        health = HealthServicer((GENERATION,), most_watchers=2, stalled_s=0.3)

        def watch() -> asyncio.Task[None]:
            return asyncio.create_task(health.Watch(HealthCheckRequest(), cast(Any, Unread())))

        watches = [watch(), watch()]
        with pytest.raises(ServiceError) as refused:
            await watch()
        assert refused.value.reason == "WATCHERS_LIMIT"
        for task in watches:
            with pytest.raises(StalledReaderError):
                await asyncio.wait_for(task, TIMEOUT_S)
        with pytest.raises(StalledReaderError):  # there is room again
            await asyncio.wait_for(watch(), TIMEOUT_S)

    asyncio.run(watched())
