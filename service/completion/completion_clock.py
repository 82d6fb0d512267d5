"""Where the time of one completion went, as its stream says it."""

from __future__ import annotations

import time

from google.protobuf.duration_pb2 import Duration

from runahead.runtime.wire.messages import Admitted, Finished
from runahead.v1 import Timing


class CompletionClock:
    """submitted_at: where it begins, as the engine's times do: see `RequestStream`."""

    def __init__(self, submitted_at: float) -> None:
        self._submitted = submitted_at
        self._first_token: float | None = None
        self._last_token = self._submitted

    def note_tokens(self) -> None:
        """Tokens have come just now."""
        self._last_token = time.monotonic()
        if self._first_token is None:
            self._first_token = self._last_token

    def timing(self, end: Finished | None, admitted: Admitted | None) -> Timing:
        """The engine's clock where it sent its times; otherwise what was seen here."""
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
    """None, which leaves a field unset, for a negative time: the engine did not see that part."""
    if seconds < 0.0:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
