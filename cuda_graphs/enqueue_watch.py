"""For how long the device may have had nothing to run inside a launch that the host enqueues piece by piece.

A captured launch is in the queue at once. Where a launch is not captured, its pieces are enqueued one after the other.
A device that is faster than the host then runs out of work between two pieces, which the time stamps at the launch's
start and end do not show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

_BEFORE: Final = -1


def unwatched() -> None:
    """In place of `EnqueueWatch.piece`, for work that is captured or that nobody watches."""


class Mark(Protocol):
    """A place in the device's queue, as `torch.cuda.Event` is one. It may be put there again and again."""

    def record(self) -> None:
        """Put it behind everything that was enqueued so far."""

    def query(self) -> bool:
        """Has the device come past it? Never waits."""


class EnqueueWatch:
    """An upper bound, from the host's clock and two marks.

    After each piece that it has enqueued, the host asks whether the device has come to the end of the piece before. If
    it has not, the device had work for all of the time that the enqueueing took. If it has, the device may have been
    idle, for no longer than that time. So the device was idle inside the launch for at most the sum of those times;
    nothing is added for a piece that was enqueued early enough. The sum is too large by what the device ran during
    those times.

    make_mark: a mark on the stream that pieces are enqueued on. clock: ns, monotonic.
    """

    def __init__(self, make_mark: Callable[[], Mark], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._marks = [make_mark(), make_mark()]
        self._clock = clock
        self._since = 0
        self._idle_ns = 0

    def begin(self) -> None:
        """The launch's first piece is enqueued next: from here on the device may come to its end."""
        self._idle_ns = 0
        self._since = self._clock()

    def first_piece(self) -> None:
        """The first piece has been enqueued. Idle time before it lies between two launches, which other time stamps
        show."""
        self._marks[_BEFORE].record()

    def piece(self) -> None:
        """One more piece has been enqueued."""
        now = self._clock()
        if self._marks[_BEFORE].query():
            self._idle_ns += now - self._since
        self._since = now
        self._marks.reverse()
        self._marks[_BEFORE].record()

    @property
    def idle_ns(self) -> int:
        """For how long the device was idle inside this launch so far, at most."""
        return self._idle_ns
