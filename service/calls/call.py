"""A call's facts from its first byte to its last, for its log line, its headers and its trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from runahead.service.calls.trace_context import TraceContext, trace_context
from runahead.v1 import Finished

_LEFT: Final = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


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
