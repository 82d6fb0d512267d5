"""Turns a call's errors into one status and a fixed sentence that reveals nothing internal."""

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

# Statuses already sent, lost connections, cancellation, and the process's exit. Everything else ends the call: a panic
# in a library's Rust code is no Exception.
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
    """Serve the body and turn its error into the status of the current call. Cancellation is left to the transport.

    count: called with the reason of each failed call.
    """
    call = current_call()
    try:
        yield call
    except _NOT_GUARDED:
        raise
    except BaseException as error:
        if context.cancelled():
            return  # the client disconnected, which caused the failure
        failure = _as_service_error(error, call)
        count(failure.reason)
        # The status may wait for long if the client does not read: release what the call holds first.
        traceback.clear_frames(error.__traceback__)
        with suppress(grpc.aio.InternalError):  # the connection ended while the status waited
            await abort_with(context, call, failure)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], call: Call, error: ServiceError) -> None:
    """End a call with an error. Raises AbortError, InternalError without a connection, or UsageError if the call
    already had a status.
    """
    call.end(error.code, error.reason)
    request_id = call.request_id or call.trace.request_id
    await context.abort_with_status(to_status(error, request_id, call.trace.headers))


def note_end(context: grpc.aio.ServicerContext[Any, Any], call: Call) -> None:
    """Record the outcome of a call that has not been recorded. Called while the call ends."""
    error = sys.exception()
    if context.cancelled() or isinstance(error, asyncio.CancelledError | grpc.aio.InternalError):
        call.end(code_of_left(context))
    elif error is not None:  # refused by another component's status
        call.end(context.code() or grpc.StatusCode.UNKNOWN)
    else:
        call.end()


def code_of_left(context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    """Return the code of a call ended by its client or its deadline."""
    is_late = context.time_remaining() == 0.0  # the transport also cancels calls past their deadline
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
    # The exception's message may hold text of the request: log only its type and stack.
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
            # Everything but the size was validated before.
            return invalid_argument([Violation(refused.field, f"{refused.field} is too large: {refused.message}")])
    log.error("unknown_refusal", request_id=call.request_id, code=refused.code)
    return ServiceError("UNEXPECTED", INTERNAL_SENTENCE)
