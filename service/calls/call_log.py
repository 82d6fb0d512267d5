"""One log line for each ended call: caller, method, amounts, duration and reason, never content.

A completion is logged at level info, another call at debug, or at info if refused. Lines of calls that ended before
their request was complete are rate limited, since such calls cost clients almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import grpc
import structlog

from runahead.service.calls.access import COMPLETIONS
from runahead.service.calls.call import Call
from runahead.service.log.library_lines import LineBudget
from runahead.v1 import FinishReason, Timing

_MOST_METHOD: Final = 100  # characters; the name of an unknown method is the client's choice
_UNREAD_LINES: Final = 100  # for each reason, within the time below
_UNREAD_S: Final = 10.0
_DIGITS: Final = 6  # decimals of a time in seconds

log = structlog.get_logger(__name__)


class Traces(Protocol):
    """Receives the spans of calls."""

    def ended(self, call: Call) -> None:
        """Take the ended call's spans, without waiting."""


class CallLog:
    """Logs calls. is_on: log at all."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._budget = LineBudget(_UNREAD_LINES, _UNREAD_S)

    def ended(self, call: Call) -> None:
        """Logs the call."""
        if not self._is_on:
            return
        left_out = 0 if call.is_read else self._budget.take(call.reason or call.code.name)
        if left_out is not None:
            _write(call, left_out)

    def left(self, code: grpc.StatusCode, begun: Callable[[], Call]) -> None:
        """Log a call that ended with this code before it was read. begun: makes the call if a line is due."""
        if not self._is_on:
            return
        left_out = self._budget.take(code.name)
        if left_out is not None:
            call = begun()
            call.code, call.ended = code, call.began  # not by `end`, which would count it
            _write(call, left_out)


def _write(call: Call, left_out: int) -> None:
    """Write the call's line. left_out: lines of this kind suppressed since the last one."""
    fields = _fields(call)
    if left_out:
        fields["left_out"] = left_out
    if call.method in COMPLETIONS or call.reason:
        log.info("call", **fields)
    else:
        log.debug("call", **fields)


def _fields(call: Call) -> dict[str, Any]:
    """Return the line's fields."""
    fields: dict[str, Any] = {
        "method": call.method[:_MOST_METHOD],
        "code": call.code.name,
        "reason": call.reason,
        "request_id": call.request_id,
        "caller": call.caller,
        "peer": call.peer,
        "prompt_tokens": call.prompt_tokens,
        "x_request_id": call.trace.request_id,
        "trace_id": call.trace.trace_id,
        "waited_for": call.waited_for,
        "waited_s": round(call.waited_s, _DIGITS) if call.waited_for else None,
        "evictions": call.evictions or None,
        "pauses": call.pauses or None,
        "total_s": round((call.ended or call.began) - call.began, _DIGITS),
    }
    if call.so_far is not None:
        usage, timing = call.so_far.usage, call.so_far.timing
        fields |= {
            "finish": finish_of(call),
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens if timing.HasField("queue") else None,  # admitted
            "queue_s": _seconds(timing, "queue"),
            "first_token_s": _seconds(timing, "first_token"),
        }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def finish_of(call: Call) -> str:
    """Return the contract's name of the completion's finish reason, empty if it has not finished."""
    if call.so_far is None or not call.has_finished:
        return ""
    return FinishReason.Name(call.so_far.reason).removeprefix("FINISH_REASON_")


def _seconds(timing: Timing, part: Literal["queue", "first_token"]) -> float | None:
    """Return a part of the timing in seconds, None if unset."""
    return round(getattr(timing, part).ToNanoseconds() / 1e9, _DIGITS) if timing.HasField(part) else None
