"""Measures how long the device may have been idle inside a launch that the host enqueues in pieces.

A captured launch is in the queue at once. Without a graph the pieces are enqueued one after another, and a device that
is faster than the host runs out of work between two pieces, which the time stamps at the launch's start and end do not
show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

_BEFORE: Final = -1


def unwatched() -> None:
    """Do nothing, in place of `EnqueueWatch.piece`, for captured work and without a watch."""


class Mark(Protocol):
    """A position in the device's queue, like `torch.cuda.Event`. It may be recorded again and again."""

    def record(self) -> None:
        """Put the mark behind everything enqueued so far."""

    def query(self) -> bool:
        """Return whether the device has passed the mark. Never waits."""


class EnqueueWatch:
    """An upper bound on idle time, from the host's clock and two marks.

    After each enqueued piece the host checks whether the device has reached the end of the previous piece. If not, the
    device had work during the whole enqueueing. If so, it may have been idle for at most that time. The bound is the
    sum of these times; it is too large by the device's work during them.

    make_mark: a mark on the stream of the pieces. clock: ns, monotonic.
    """

    def __init__(self, make_mark: Callable[[], Mark], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._marks = [make_mark(), make_mark()]
        self._clock = clock
        self._since = 0
        self._idle_ns = 0

    def begin(self) -> None:
        """Begin a launch, before its first piece is enqueued."""
        self._idle_ns = 0
        self._since = self._clock()

    def first_piece(self) -> None:
        """Record the first enqueued piece. Idle time before it is between two launches, which other time stamps
        show."""
        self._marks[_BEFORE].record()

    def piece(self) -> None:
        """Record one more enqueued piece."""
        now = self._clock()
        if self._marks[_BEFORE].query():
            self._idle_ns += now - self._since
        self._since = now
        self._marks.reverse()
        self._marks[_BEFORE].record()

    @property
    def idle_ns(self) -> int:
        """Most idle time of the device inside this launch so far."""
        return self._idle_ns
