"""A call that has ended before anybody looked at it is counted and has its line, and nothing else is done about it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from runahead.service.calls.admission import Access, Admission
from runahead.service.calls.call import CallLog
from runahead.service.calls.call_interceptor import CallInterceptor, OpenCalls
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.shared_memory.call_tables import CODES, MethodFigures
from tests.service.log_lines import log_lines

METHOD = "/runahead.v1.GenerationService/Generate"


class Context:
    """Of a call whose client is gone, or whose time is over, while it waits in the library."""

    def __init__(self, time_remaining: float | None) -> None:
        self._time_remaining = time_remaining

    def time_remaining(self) -> float | None:
        return self._time_remaining

    def cancelled(self) -> bool:
        return True

    def peer(self) -> str:
        return "ipv4:192.0.2.1:4711"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-request-id", "mine"),)


class Unasked(Access):
    """Nobody may be asked who calls."""

    def admit(self, method: str, context: Any, *, exists: bool = True) -> None:
        raise AssertionError("somebody has looked at it")


async def leave(interceptor: CallInterceptor, times: int, time_remaining: float | None = None) -> None:
    """Calls that are cancelled in the turn in which the library has handed them over."""

    async def continuation(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: None)

    for _ in range(times):
        handler = await interceptor.intercept_service(continuation, SimpleNamespace(method=METHOD))
        call = asyncio.create_task(handler.stream_unary(None, Context(time_remaining)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


def interceptor_of(board: Board) -> CallInterceptor:
    admission = Admission.of(FrontEndSettings(), Access(), board, board.line(0))
    return CallInterceptor(OpenCalls(), Unasked(), admission, 60.0, CallLog())


def figures(board: Board) -> MethodFigures:
    return next(found for (_, _, name), found in board.calls.total() if name == "Generate")


@pytest.mark.parametrize(
    ("time_remaining", "code", "name"),
    [(None, "Canceled", "CANCELLED"), (0.0, "DeadlineExceeded", "DEADLINE_EXCEEDED")],
)
def test_it_is_counted_and_has_a_line_and_nobody_looks_at_it(
    time_remaining: float | None, code: str, name: str
) -> None:
    board = Board()
    with log_lines() as lines:
        asyncio.run(leave(interceptor_of(board), 1, time_remaining))
        line = lines.call("Generate")
    found = figures(board)
    assert (found.started, dict(zip(CODES, found.ended, strict=True))[code], sum(found.ended)) == (1, 1, 1)
    assert (line["code"], line["x_request_id"], line["peer"]) == (name, "mine", "ipv4:192.0.2.1:4711")
    assert line["total_s"] == 0.0


def test_they_can_not_fill_the_log() -> None:
    board = Board()
    with log_lines() as lines:
        asyncio.run(leave(interceptor_of(board), 500))
        found = lines.rest()
    assert figures(board).ended[CODES.index("Canceled")] == 500
    assert 0 < len(found) <= 200, "one hundred in ten seconds"


def test_nothing_is_said_of_them_where_calls_are_not_logged() -> None:
    with log_lines() as lines:
        log = CallLog(is_on=False)
        log.left(grpc.StatusCode.CANCELLED, lambda: pytest.fail("it was made for a line that nobody wants"))
        assert lines.rest() == []
