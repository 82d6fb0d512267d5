"""The end of a completion in the contract's fields: reason, usage and timing."""

from __future__ import annotations

import time
from collections.abc import Container

from google.protobuf.duration_pb2 import Duration

from runahead.runtime.wire import messages
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.v1 import FinishReason, Timing, Usage

_REASONS = {
    EngineReason.END_OF_SEQUENCE: FinishReason.FINISH_REASON_END_OF_SEQUENCE,
    EngineReason.STOP: FinishReason.FINISH_REASON_STOP,
    EngineReason.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    EngineReason.CONTEXT_LENGTH: FinishReason.FINISH_REASON_CONTEXT_LENGTH,
    EngineReason.ABORTED: FinishReason.FINISH_REASON_ABORTED,
}


def reason_of(end: messages.Finished, turn_ends: Container[int]) -> FinishReason:
    """Return the contract's finish reason. turn_ends: stop tokens that end a chat's answer, reported as the model's
    end.
    """
    if end.stop_token_id in turn_ends:
        return FinishReason.FINISH_REASON_END_OF_SEQUENCE
    return _REASONS[EngineReason(end.reason)]


def usage(
    end: messages.Finished | None, admitted: messages.Admitted | None, prompt_tokens: int, completion_tokens: int
) -> Usage:
    """Return the usage. end, admitted: the engine's messages, None if not sent. Drafts are unknown before the end."""
    told = end or admitted
    found = Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=told.cached_tokens if told else 0,
        completion_tokens=completion_tokens,
    )
    if end is not None:
        found.drafted_tokens, found.accepted_tokens = sum(end.drafted), sum(end.accepted)
        found.drafted_by_place.update(enumerate(end.drafted, start=1))
        found.accepted_by_place.update(enumerate(end.accepted, start=1))
        if end.tokens_per_launch:
            found.tokens_per_launch = end.tokens_per_launch
    return found


class CompletionClock:
    """Measures a completion's times. submitted_at: the start, as in the engine's times (`RequestStream`)."""

    def __init__(self, submitted_at: float) -> None:
        self._submitted = submitted_at
        self._first_token: float | None = None
        self._last_token = self._submitted

    def note_tokens(self) -> None:
        """Record that tokens have arrived now."""
        self._last_token = time.monotonic()
        if self._first_token is None:
            self._first_token = self._last_token

    def timing(self, end: messages.Finished | None, admitted: messages.Admitted | None) -> Timing:
        """Return the timing by the engine's clock if it sent its times, else by this one."""
        if end is not None:
            return Timing(
                queue=_duration(end.queue_s),
                prefill=_duration(end.prefill_s),
                first_token=_duration(end.first_token_s),
                decode=_duration(end.decode_s),
            )
        first = self._first_token
        return Timing(
            queue=_duration(admitted.queue_s) if admitted else None,
            first_token=None if first is None else _duration(first - self._submitted),
            decode=None if first is None else _duration(self._last_token - first),
        )


def _duration(seconds: float) -> Duration | None:
    """Return a duration, or None, which leaves the field unset, for a negative time: the engine did not measure that
    part.
    """
    if seconds < 0.0:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
