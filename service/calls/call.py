"""A call's facts from its first byte to its last: for its log line, its headers and its trace.

Its ids across services are the header `x-request-id` and W3C's `traceparent`. Both come from the call's metadata if
well formed, and are made otherwise: a malformed header costs the trace, never the call. See
https://www.w3.org/TR/trace-context.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from runahead.v1 import Finished

REQUEST_ID_HEADER: Final = "x-request-id"
TRACE_HEADER: Final = "traceparent"

SAMPLED: Final = 0x01  # the sampled flag

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_TRACE: Final = 256  # characters of a header; longer ones are ignored

_LEFT: Final = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A call's position in its trace.

    request_id: the header's. trace_id: 32 hexadecimal digits. parent_id: the caller's span, 16 digits; empty if the
    trace begins here. span_id: this call's, 16 digits. flags: the caller's `SAMPLED` or 0.
    """

    request_id: str
    trace_id: str
    parent_id: str
    span_id: str
    flags: int

    @property
    def traceparent(self) -> str:
        """The header for the next service and for the answer: its parent is this call."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of the answer."""
        return (REQUEST_ID_HEADER, self.request_id), (TRACE_HEADER, self.traceparent)


def trace_context(metadata: Iterable[tuple[str, object]], flags: int = 0) -> TraceContext:
    """Make the trace context of a call with this metadata. flags: for a trace that begins here."""
    given: dict[str, list[object]] = {REQUEST_ID_HEADER: [], TRACE_HEADER: []}
    for key, value in metadata:
        if key in given:
            given[key].append(value)
    request_id, parent = _only(given[REQUEST_ID_HEADER]), _only(given[TRACE_HEADER])
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = secrets.token_hex(16)
    trace_id, parent_id, parent_flags = _parsed(parent)
    return TraceContext(
        request_id=request_id,
        trace_id=trace_id or secrets.token_hex(16),
        parent_id=parent_id,
        span_id=secrets.token_hex(8),
        flags=parent_flags if trace_id else flags,
    )


def _parsed(parent: str) -> tuple[str, str, int]:
    """Parse a `traceparent` header into trace, span and known flags; empty and 0 if malformed."""
    found = _TRACE.fullmatch(parent)
    if found is None:
        return "", "", 0
    version, trace_id, parent_id, flags, more = found.groups()
    is_known = version != "ff" and not (version == "00" and more)  # a later version may have more fields
    if not is_known or not int(trace_id, 16) or not int(parent_id, 16):
        return "", "", 0
    return trace_id, parent_id, int(flags, 16) & SAMPLED


def _only(values: list[object]) -> str:
    """Return a header's only value; empty if it is missing, repeated, not text or too long."""
    if len(values) == 1 and isinstance(values[0], str) and len(values[0]) <= _MOST_TRACE:
        return values[0]
    return ""


@dataclass(slots=True)
class Call:
    """The served call.

    began: monotonic, seconds.
    began_ns: wall clock. peer: as gRPC writes addresses. caller: its name; empty while unknown and without
        authentication. is_read: the request is complete. request_id: the completion's, set once it is known to be well
        formed. prompt_tokens, submitted (monotonic): set when the engine has the request. so_far, has_finished: set
        when the request is released, finished or not.
    queued: monotonic, when the request was sent to the engine. waited_for, waited_s: the longest wait before the first
        launch, in seconds; empty without one. evictions, pauses: of its completions, for lack of KV blocks. ended:
        monotonic. code, reason: how the call ended. tell: called at its end.
    """

    method: str = ""
    peer: str = ""
    trace: TraceContext = field(default_factory=lambda: trace_context(()))
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    caller: str = ""
    is_read: bool = False
    request_id: str = ""
    prompt_tokens: int | None = None
    submitted: float | None = None
    queued: float | None = None
    so_far: Finished | None = None
    has_finished: bool = False
    code: grpc.StatusCode = grpc.StatusCode.OK
    reason: str = ""
    ended: float | None = None
    waited_for: str = ""
    waited_s: float = 0.0
    evictions: int = 0
    pauses: int = 0
    tell: Callable[[Call], None] = lambda call: None

    def submit(self, prompt_tokens: int, submitted_at: float) -> None:
        """Record that the engine has the request. submitted_at: see `RequestStream`."""
        self.prompt_tokens, self.submitted, self.queued = prompt_tokens, submitted_at, time.monotonic()

    def note(self, has_finished: bool, so_far: Finished) -> None:
        """Record the completion's usage and times. The completion itself is not kept, since a call's status may wait
        for long.
        """
        self.has_finished, self.so_far = has_finished, so_far
        if self.queued is not None and not so_far.timing.HasField("queue"):
            self.waited("admission", time.monotonic() - self.queued)

    def waited(self, waited_for: str, seconds: float) -> None:
        """Record a wait of its completion. The longest one is kept."""
        if seconds > self.waited_s:
            self.waited_for, self.waited_s = waited_for, seconds

    @contextmanager
    def waiting_for(self, waited_for: str) -> Iterator[None]:
        """Record the time that the body takes as a wait."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.waited(waited_for, time.monotonic() - begun)

    @property
    def was_left(self) -> bool:
        """Whether the client cancelled, disconnected or let its deadline pass, rather than the service ending the call
        with a reason.
        """
        return self.code in _LEFT and not self.reason

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, reason: str = "") -> None:
        """Record the call's end, or that its status is about to be sent. The first record holds."""
        if self.ended is None:
            self.ended, self.code, self.reason = time.monotonic(), code, reason
            self.tell(self)


_current: ContextVar[Call] = ContextVar("call")


def current_call() -> Call:
    """Return the call being served, or a placeholder outside the interceptor."""
    try:
        return _current.get()
    except LookupError:
        return Call()


@contextmanager
def serving(call: Call) -> Iterator[Call]:
    """Make this call the current one in the body and in tasks it starts."""
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


async def begin_answer(context: grpc.aio.ServicerContext[Any, Any], call: Call) -> None:
    """Send the headers of an answer with the call's ids.

    Only with the first message: gRPC clients retry a call that was refused without headers, and never one that has had
    headers.
    """
    await context.send_initial_metadata(call.trace.headers)
