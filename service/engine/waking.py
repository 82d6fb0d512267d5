"""Wakes readers when a launch's tokens arrive, a few in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

READERS_A_TURN: Final = 4


class Waking:
    """Wakes readers in order of arrival, `READERS_A_TURN` in each turn of the running event loop.

    The loop runs everything ready before it polls sockets, and a woken reader takes tens of microseconds to send its
    tokens: a launch of 64 rows would take one turn of 5 to 10 ms. Everything else waits for that turn, and a new call
    needs several turns. Small slices keep turns short and the order fair.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: deque[Callable[[], None]] = deque()
        self._is_running = False

    def add(self, wake: Callable[[], None]) -> None:
        """Call `wake` after all those added before, in this turn of the loop or a later one."""
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
