"""Calls, from their beginning to whoever wants to hear of their end: the log, and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from runahead.service.calls.call import Call
from runahead.service.calls.call_log import CallLog
from runahead.service.calls.trace_context import SAMPLED, TraceContext, trace_context


class Traces(Protocol):
    """Where the spans of calls go."""

    def ended(self, call: Call) -> None:
        """Takes the call's spans. Never waits."""


class CallRecords:
    """traces: None keeps none, and asks nobody else to keep those that begin here."""

    def __init__(self, log: CallLog, traces: Traces | None = None) -> None:
        self._log = log
        self._traces = traces

    def trace(self, metadata: Iterable[tuple[str, object]]) -> TraceContext:
        """Of a call that has come with this metadata."""
        return trace_context(metadata, 0 if self._traces is None else SAMPLED)

    def ended(self, call: Call) -> None:
        """The call has ended."""
        self._log.ended(call)
        if self._traces is not None:
            self._traces.ended(call)

    def left(self, code: grpc.StatusCode, begun: Callable[[], Call]) -> None:
        """A call has ended with this code before anybody looked at it. It has a line in the log, as far as these lines
        go, and no span.

        begun: makes it. That takes as long as all else which is done about such a call, so it is asked for the line
        alone.
        """
        self._log.left(code, begun)
