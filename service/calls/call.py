"""A call's facts from its first byte to its last: for its log line, its headers and its trace.

Its ids across services are the header `x-request-id` and W3C's `traceparent`. Both come from the call's metadata if
well formed, and are made otherwise: a malformed header costs the trace, never the call. See
https://www.w3.org/TR/trace-context.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import grpc
import structlog
from google.protobuf.message import Message

from runahead.service.engine.pulse import CHECKS
from runahead.service.engine.request_stream import StalledReaderError
from runahead.service.log.library_lines import LineBudget
from runahead.v1 import Finished, FinishReason, Timing

SERVICE: Final = "/runahead.v1.GenerationService/"
FACADE: Final = "/vllm.grpc.engine.VllmEngine/"  # served by `runahead.service.servicers.vllm_servicer`
HEALTH: Final = frozenset(f"/grpc.health.v1.Health/{method}" for method in ("Check", "List", "Watch"))
COMPLETIONS: Final = frozenset({SERVICE + "Generate", SERVICE + "GenerateOnce", FACADE + "Generate"})
WORK: Final = COMPLETIONS | {SERVICE + method for method in ("RenderChat", "Tokenize", "Detokenize")}

REQUEST_ID_HEADER: Final = "x-request-id"
TRACE_HEADER: Final = "traceparent"

SAMPLED: Final = 0x01  # the sampled flag

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_TRACE: Final = 256  # characters of a header; longer ones are ignored

_LEFT: Final = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

_MOST_METHOD: Final = 100  # characters; the name of an unknown method is the client's choice
_UNREAD_LINES: Final = 100  # for each reason, within the time below
_UNREAD_S: Final = 10.0
_DIGITS: Final = 6  # decimals of a time in seconds

log = structlog.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


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
        launch, in seconds; empty without one. evictions, pauses, chunks_deferred: of its completions, as in the
        engine's `Finished`. ended: monotonic. code, reason: how the call ended. tell: called at its end.
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
    chunks_deferred: int = 0
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
            self.note_wait("admission", time.monotonic() - self.queued)

    def note_wait(self, waited_for: str, seconds: float) -> None:
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
            self.note_wait(waited_for, time.monotonic() - begun)

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
        "chunks_deferred": call.chunks_deferred or None,
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


class StreamWriter:
    """Writes the current call's stream, as a context manager around everything that the call holds.

    A write ends when the transport takes its bytes, which depends on the client's reads. A write longer than
    `stalled_s` seconds raises StalledReaderError; its rest stays in the library, which can't reset a call, until the
    client reads it or the connection ends.
    """

    def __init__(self, context: _Context, stalled_s: float) -> None:
        self._context = context
        self._stalled_s = stalled_s
        self._loop = asyncio.get_running_loop()
        self._headers: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._checks: int | None = None  # checks of the current write
        self._stalled = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    async def __aenter__(self) -> StreamWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """The writer's resources are released by now, so the call's status can wait behind its headers."""
        if self._timer is not None:
            self._timer.cancel()
        if self._headers is not None and isinstance(error, Exception):
            await asyncio.wait([self._headers])

    async def begin(self, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Send the headers, with these ones, before any message: a client that takes no message takes headers, and only
        then can a status end the call. Raises StalledReaderError.
        """
        self._set_timer()
        self._headers = asyncio.ensure_future(self._context.send_initial_metadata(tuple(headers)))
        self._headers.add_done_callback(lambda headers: headers.cancelled() or headers.exception())
        await self._take(asyncio.shield(self._headers))

    def write(self, event: Message) -> Awaitable[None]:
        """Write an event; done when the transport has it. Raises StalledReaderError."""
        return self._take(self._context.write(event))

    async def _take(self, writing: Awaitable[None]) -> None:
        self._checks = 0
        try:
            await writing
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            self._task.uncancel()
            raise StalledReaderError(self._stalled_s) from None
        finally:
            self._checks = None

    def _set_timer(self) -> None:
        """Set the stream's one timer, which writes do not touch."""
        self._timer = self._loop.call_later(self._stalled_s / CHECKS, self._check)

    def _check(self) -> None:
        """Count checks of a write, and end it after more than CHECKS: the first may come at once, and time in which the
        process was stopped counts as one.
        """
        if self._checks is not None:
            self._checks += 1
        if self._checks is None or self._checks <= CHECKS:
            self._set_timer()
        else:
            self._stalled = True
            self._task.cancel()
