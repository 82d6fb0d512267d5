"""Calls that come while the server stops: each is told the reason, as long as the library would tell it anything."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2

from runahead.service.calls import call_interceptor
from runahead.service.calls.call import Call
from runahead.service.calls.call_interceptor import OpenCalls
from runahead.v1 import GenerationServiceStub, StatsRequest
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail
from tests.service.running_service import Service

CALLERS = 20


def test_a_call_that_comes_at_the_end_is_answered_behind_the_server_s_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    late: list[asyncio.Future[None]] = []

    async def abort(*_: object) -> None:
        said.append("answered")

    async def stop() -> None:
        said.append("stopping")
        await asyncio.wait_for(late[0], TIMEOUT_S)
        said.append("stopped")

    async def come(calls: OpenCalls) -> None:
        async with calls.entered(cast(grpc.aio.ServicerContext[Any, Any], None), cast(Call, None)):
            pass

    async def body() -> None:
        calls = OpenCalls()
        ending = asyncio.ensure_future(calls.end(0.0, stop))
        await asyncio.sleep(0)
        late.append(asyncio.ensure_future(come(calls)))
        await ending

    monkeypatch.setattr(call_interceptor, "abort_with", abort)
    asyncio.run(body())
    assert said == ["stopping", "answered", "stopped"]


def test_whoever_calls_again_and_again_is_told_of_the_shutdown_and_never_that_it_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path) as service:
        begun, ends = threading.Barrier(CALLERS + 1), list[grpc.RpcError]()

        def call_again_and_again() -> None:
            with service.connect() as channel:
                stub = GenerationServiceStub(channel)
                stub.Stats(StatsRequest(), timeout=TIMEOUT_S)
                begun.wait(TIMEOUT_S)
                while True:
                    try:
                        stub.Stats(StatsRequest(), timeout=TIMEOUT_S)
                    except grpc.RpcError as error:
                        ends.append(error)
                        if not detail_of(error):
                            return

        callers = [threading.Thread(target=call_again_and_again) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        begun.wait(TIMEOUT_S)
        service.stop(grace_s=0.0)
        for caller in callers:
            caller.join(TIMEOUT_S)
    assert {code(error) for error in ends} == {grpc.StatusCode.UNAVAILABLE}
    reasons = [detail_of(error) for error in ends]
    assert reasons.count("SHUTDOWN") >= CALLERS, "each was told"


def detail_of(error: grpc.RpcError) -> str:
    """The reason that the server has given. Empty where there was no server any more."""
    has_details = any(key == "grpc-status-details-bin" for key, _ in cast(Any, error).trailing_metadata() or ())
    return str(detail(error, error_details_pb2.ErrorInfo).reason) if has_details else ""
