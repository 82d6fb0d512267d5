"""How a call ends when something goes wrong: with one status and a fixed sentence that shows nothing of the server's
inside."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
import structlog

from runahead.service.calls.call import Call, current_call
from runahead.service.contract.errors import (
    INTERNAL_SENTENCE,
    ServiceError,
    Violation,
    invalid_argument,
    to_status,
    unavailable,
)
from runahead.service.engine.request_stream import (
    EngineLostError,
    RequestRefusedError,
    SlowReaderError,
    StalledReaderError,
)

log = structlog.get_logger(__name__)

# Statuses that are sent already, a connection that is gone, a cancellation, and the end of the process. Anything else
# ends the call: a panic in a library's Rust code is no Exception.
_NOT_GUARDED: Final = (
    grpc.aio.AbortError,
    grpc.aio.InternalError,
    asyncio.CancelledError,
    GeneratorExit,
    KeyboardInterrupt,
    SystemExit,
)


@asynccontextmanager
async def guarded(context: grpc.aio.ServicerContext[Any, Any], count: Callable[[str], None]) -> AsyncIterator[Call]:
    """Serves the body; what it raises becomes the status of the current call. A cancelled call is left to the
    transport.

    count: told of the reason of each call that ends so.
    """
    call = current_call()
    try:
        yield call
    except _NOT_GUARDED:
        raise
    except BaseException as error:
        if context.cancelled():
            return  # the client is gone, which is why something failed
        failure = _as_service_error(error, call)
        count(failure.reason)
        # The status may wait for long, for a client that does not read. What the call held is let go of first.
        traceback.clear_frames(error.__traceback__)
        with suppress(grpc.aio.InternalError):  # the connection has ended while the status waited
            await abort_with(context, call, failure)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], call: Call, error: ServiceError) -> None:
    """Ends a call with an error. Raises AbortError, InternalError where there is no connection any more, or UsageError
    if the call had a status already."""
    call.end(error.code, error.reason)
    request_id = call.request_id or call.trace.request_id
    await context.abort_with_status(to_status(error, request_id, call.trace.headers))


def note_end(context: grpc.aio.ServicerContext[Any, Any], call: Call) -> None:
    """How a call has ended that nothing was noted of: called while it ends, whatever it ends with."""
    error = sys.exception()
    if context.cancelled() or isinstance(error, asyncio.CancelledError | grpc.aio.InternalError):
        call.end(code_of_left(context))
    elif error is not None:  # refused with a status that somebody else has made
        call.end(context.code() or grpc.StatusCode.UNKNOWN)
    else:
        call.end()


def code_of_left(context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    """How a call has ended that its client, or its deadline, has ended."""
    is_late = context.time_remaining() == 0.0  # the transport cancels a call whose time is over, too
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED


def _as_service_error(error: BaseException, call: Call) -> ServiceError:
    match error:
        case ServiceError():
            return error
        case RequestRefusedError():
            return _refusal(error, call)
        case EngineLostError():
            return unavailable(error.reason, error.message)
        case SlowReaderError():
            return ServiceError("SLOW_READER", "the stream's reader is too slow: too much is unread")
        case StalledReaderError(after_s=after_s):
            return ServiceError("STALLED_READER", f"nothing of the stream was read for {after_s:g} s")
    # The message of the exception may hold text of the request: only its type and the lines it came by are logged.
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    log.error(
        "call_failed",
        method=call.method,
        request_id=call.request_id or call.trace.request_id,
        x_request_id=call.trace.request_id,
        trace_id=call.trace.trace_id,
        error=type(error).__name__,
        frames=frames,
    )
    return ServiceError("UNEXPECTED", INTERNAL_SENTENCE)


def _refusal(refused: RequestRefusedError, call: Call) -> ServiceError:
    match refused.code:
        case "ALREADY_EXISTS":
            return ServiceError("DUPLICATE_ID", f"request_id {call.request_id!r} is in use")
        case "INVALID_ARGUMENT":
            # Everything but the size was checked before the engine was asked.
            return invalid_argument([Violation(refused.field, f"{refused.field} is too large: {refused.message}")])
    log.error("unknown_refusal", request_id=call.request_id, code=refused.code)
    return ServiceError("UNEXPECTED", INTERNAL_SENTENCE)
