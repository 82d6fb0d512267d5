"""What is known of a call from its first byte to its last: for its line in the log, its answer's headers, its trace."""

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
    """The call that is served.

    began, began_ns: on the monotonic clock, in seconds, and on the wall clock. peer: as gRPC writes addresses. caller:
    its name; empty before it is known, and where nobody is asked. is_read: its request is there whole. request_id: of
    its completion, set as soon as that is known to be well formed. prompt_tokens and submitted, on the monotonic clock:
    set when the engine has it; so_far and has_finished when it is let go of, whether it has come to its end or not.
    queued: when the engine was sent its request, on the monotonic clock. waited_for, waited_s: what its completion
    waited for longest before its first launch, and for how many seconds; empty before it has waited. ended: on the
    monotonic clock. code and reason: how it ended. tell: is called when it has.
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
    tell: Callable[[Call], None] = lambda call: None

    def submit(self, prompt_tokens: int, submitted_at: float) -> None:
        """The engine has its request. submitted_at: of its `RequestStream`."""
        self.prompt_tokens, self.submitted, self.queued = prompt_tokens, submitted_at, time.monotonic()

    def note(self, has_finished: bool, so_far: Finished) -> None:
        """What its completion has used, and when. It is not kept itself: a call's status may wait for long."""
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
        """It has ended since its client cancelled it, went away, or had set a deadline that has passed: not by anything
        that the service decided, which would have a reason."""
        return self.code in _LEFT and not self.reason

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, reason: str = "") -> None:
        """It has ended, or its status is about to be sent, which may wait for long. What is said first holds."""
        if self.ended is None:
            self.ended, self.code, self.reason = time.monotonic(), code, reason
            self.tell(self)


_current: ContextVar[Call] = ContextVar("call")


def current_call() -> Call:
    """The call that is being served; one that nobody knows of, where none has come through the interceptor."""
    try:
        return _current.get()
    except LookupError:
        return Call()


@contextmanager
def serving(call: Call) -> Iterator[Call]:
    """`current_call` is this one in the body, and in the tasks that it starts."""
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


async def begin_answer(context: grpc.aio.ServicerContext[Any, Any], call: Call) -> None:
    """Sends the headers of an answer, with what the call is known by.

    Only when the first message is there: gRPC's clients try a call again by themselves if it was refused without
    headers, and never after it has had some.
    """
    await context.send_initial_metadata(call.trace.headers)
