"""How a call ends when something goes wrong: with one status and a fixed sentence that shows nothing of the server's
inside."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from runahead.service.errors import (
    ServiceError,
    Violation,
    already_exists,
    internal,
    invalid_argument,
    slow_reader,
    stalled_reader,
    to_status,
    unavailable,
)
from runahead.service.request_stream import EngineLostError, RequestRefusedError, SlowReaderError, StalledReaderError

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Call:
    """The call that is served. `request_id`: set as soon as it is known."""

    request_id: str = ""


@asynccontextmanager
async def guarded(context: grpc.aio.ServicerContext[Any, Any], count: Callable[[str], None]) -> AsyncIterator[Call]:
    """Serves the body; what it raises becomes the call's status. A cancelled call is left to the transport.

    count: told of the reason of each call that ends so.
    """
    call = Call()
    try:
        yield call
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise  # it has its status already, or there is no connection any more that one could go by
    except Exception as error:
        if context.cancelled():
            return  # the client is gone, which is why something failed
        failure = _as_service_error(error, call)
        count(failure.reason)
        # The status may wait for long, for a client that does not read. What the call held is let go of first.
        traceback.clear_frames(error.__traceback__)
        with suppress(grpc.aio.InternalError):  # the connection has ended while the status waited
            await context.abort_with_status(to_status(failure, call.request_id))


def _as_service_error(error: Exception, call: Call) -> ServiceError:
    match error:
        case ServiceError():
            return error
        case RequestRefusedError():
            return _refusal(error, call)
        case EngineLostError():
            return unavailable(error.reason, error.message)
        case SlowReaderError():
            return slow_reader()
        case StalledReaderError(after_s=after_s):
            return stalled_reader(after_s)
    call.request_id = call.request_id or uuid.uuid4().hex  # of a call that has none, for the log and the client alike
    # The message of the exception may hold text of the request: only its type and the lines it came by are logged.
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    log.error("call_failed", request_id=call.request_id, error=type(error).__name__, frames=frames)
    return internal()


def _refusal(refused: RequestRefusedError, call: Call) -> ServiceError:
    match refused.code:
        case "ALREADY_EXISTS":
            return already_exists(call.request_id)
        case "INVALID_ARGUMENT":
            # Everything but the size was checked before the engine was asked.
            return invalid_argument([Violation(refused.field, f"{refused.field} is too large: {refused.message}")])
    log.error("unknown_refusal", request_id=call.request_id, code=refused.code)
    return internal()
