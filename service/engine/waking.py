"""Who is woken when a launch's tokens have come: a few readers in each turn of the event loop, not all at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

READERS_A_TURN: Final = 4


class Waking:
    """Wakes readers in the order in which something came for them, `READERS_A_TURN` in each turn of the running event
    loop.

    The loop runs all that is ready before it looks at its sockets again, and a reader that is woken takes tens of
    microseconds and more to send what came. Woken all at once, the readers of a launch of 64 rows are one turn of 5 to
    10 ms. What comes meanwhile waits for its end, and again for that of the next one: a new call needs several turns,
    and gRPC's server takes one call after the other. In slices of a few a turn is short, and nobody overtakes anybody.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: deque[Callable[[], None]] = deque()
        self._is_running = False

    def add(self, wake: Callable[[], None]) -> None:
        """`wake` is called behind all that were added before, in this turn of the loop or one of the next."""
        self._due.append(wake)
        if not self._is_running:
            self._is_running = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        due = self._due
        for _ in range(min(READERS_A_TURN, len(due))):
            due.popleft()()
        self._is_running = bool(due)
        if due:
            self._loop.call_soon(self._next)
