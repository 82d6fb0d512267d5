"""A client whose connection is gone, in each phase of its completion: what the call held is free again, and the engine
is told of what it had been told."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.admission import Access
from runahead.service.calls.call import Call, CallLog
from runahead.service.calls.call_interceptor import CallInterceptor, OpenCalls
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.call_tables import Resource
from runahead.v1 import GenerateRequest
from tests.service.completion.test_stalled_streams import begin, sync, wait_for
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.raw_http2 import RawClient
from tests.service.running_service import Service

LONG_S = 600.0  # no time-out of the service ends what a test waits for
REQUEST = GenerateRequest(text="x").SerializeToString()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = tmp_path / "engine.sock"
    settings = FrontEndSettings(upload_timeout_s=LONG_S, stalled_stream_s=LONG_S)
    with Service(FakeEngine(path), path, settings=settings) as running:
        yield running


@pytest.fixture
def ended() -> Iterator[queue.Queue[Call]]:
    """What is known of calls of Generate when they end."""
    calls: queue.Queue[Call] = queue.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallLog, "ended", lambda _, call: calls.put(call) if call.method.endswith("Generate") else None)
        yield calls


def held(service: Service) -> list[int]:
    """Of each resource, by all calls that are open."""
    counts: list[int] = service.front_end.servicer._board.held.in_all().tolist()
    return counts


@contextmanager
def everything_is_given_back(service: Service, ended: queue.Queue[Call], code: grpc.StatusCode) -> Iterator[None]:
    """After the body, in which the connection of the only call ends."""
    yield
    assert ended.get(timeout=TIMEOUT_S).code == code
    wait_for(service, lambda: not any(held(service)))
    assert service.front_end.servicer.counters.open_streams == 0


@pytest.mark.parametrize("sent", ["its headers", "a part of its message", "its message without an end"])
def test_before_the_request_is_there_whole(service: Service, ended: queue.Queue[Call], sent: str) -> None:
    with RawClient(service.port) as client:
        stream = client.begin("Generate")
        if sent != "its headers":
            is_cut = sent == "a part of its message"
            client.message(stream, REQUEST, ends=False, says=1000 if is_cut else None)
        client.wait_heard()
        wait_for(service, lambda: held(service)[Resource.UPLOADS] == 1)
        assert ended.empty() and service.engine.submitted.empty()
    ended.get(timeout=TIMEOUT_S)
    wait_for(service, lambda: not any(held(service)))
    assert service.front_end.servicer.counters.open_streams == 0
    sync(service)
    assert service.engine.live == {} == service.engine.preparing, "what the engine was told of, it was told of again"


@pytest.mark.parametrize("count", [0, 1])
def test_a_call_that_is_cancelled_as_its_requests_end_has_brought_none(count: int) -> None:
    """The library says that nothing more comes, and in the next turn of the loop that the call is cancelled."""
    messages: list[Any] = [*[REQUEST] * count, grpc.aio.EOF]

    class Context:
        async def read(self) -> Any:
            if len(messages) == 1:
                task, loop = asyncio.current_task(), asyncio.get_running_loop()
                assert task is not None
                loop.call_soon(lambda: loop.call_soon(task.cancel))
            return messages.pop(0)

    interceptor = CallInterceptor(OpenCalls(), Access(), Any, 60.0, Any)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interceptor._one_message(Context()))  # type: ignore[arg-type]
    assert messages == []


@pytest.mark.parametrize("phase", ["before it is accepted", "while it is queued", "while it brings tokens"])
def test_while_the_engine_has_it(service: Service, ended: queue.Queue[Call], phase: str) -> None:
    service.engine.auto_accept = phase != "before it is accepted"
    with everything_is_given_back(service, ended, grpc.StatusCode.CANCELLED), RawClient(service.port) as client:
        stream, handle = begin(client, service)
        if phase == "while it is queued":
            client.messages_of(stream, 1)
        elif phase == "while it brings tokens":
            service.engine.output(handle, [1])
            client.messages_of(stream, 2)
        assert held(service)[Resource.STREAMS] == 1
        assert service.engine.cancelled.empty()
        client.close()
        assert service.engine.next_cancel() == handle
        assert service.engine.cancel_reasons[handle] == FinishReason.CANCELLED
    assert service.front_end.servicer.counters.cancelled == 1


def test_between_its_last_token_and_its_status(service: Service, ended: queue.Queue[Call]) -> None:
    """Its end is there, and the client's window has no room for it."""
    with RawClient(service.port) as reader:
        stream, handle = begin(reader, service)
        service.engine.output(handle, [1], FinishReason.LENGTH)
        *before, _ = reader.messages_of(stream, 3)
        reader.status_of(stream)
    assert ended.get(timeout=TIMEOUT_S).code == grpc.StatusCode.OK
    window = sum(5 + len(message) for message in before)
    with (
        everything_is_given_back(service, ended, grpc.StatusCode.CANCELLED),
        RawClient(service.port, window=window) as client,
    ):
        stream, handle = begin(client, service)
        service.engine.output(handle, [1], FinishReason.LENGTH)
        client.messages_of(stream, 2)
        sync(service)
        assert held(service)[Resource.STREAMS] == 1 and ended.empty(), "its end waits to be sent"
    sync(service)
    assert service.engine.cancelled.empty(), "the engine had ended it"
    assert service.front_end.servicer.counters.cancelled == 1
