"""A fair queue: callers take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Up to `places` turns at a time. The next turn goes to the waiting caller whose last turn is the oldest; a
    caller's own work is first come, first served. Use it on one event loop.
    """

    def __init__(self, places: int = 1) -> None:
        self._free = places
        self.given = 0  # turns so far
        self._last: dict[int, int] = {}  # the last turn of each waiting caller
        self._waiting: dict[int, deque[asyncio.Future[int]]] = {}

    @property
    def waiting(self) -> int:
        """The number of waiters."""
        return sum(not mine.cancelled() for lane in self._waiting.values() for mine in lane)

    async def do(self, caller: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work within a turn. If cancelled, work that has begun still ends, and then its turn."""
        await self.take(caller)
        working = asyncio.ensure_future(work())
        working.add_done_callback(lambda task: task.cancelled() or task.exception())
        working.add_done_callback(lambda _: self.give_back())
        return await asyncio.shield(working)

    async def take(self, caller: int, before: int | None = None) -> int:
        """Wait for a turn and return its number; give it back later. A cancelled call gets none. before: the number of
        the work's last turn, which puts it before the caller's other work; None for new work.
        """
        if self._free:
            self._free -= 1
            self.given += 1
            return self.given
        mine: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._last.setdefault(caller, self.given if before is None else before)
        lane = self._waiting.setdefault(caller, deque())
        if before is None:
            lane.append(mine)
        else:
            lane.appendleft(mine)
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self.give_back()  # it came at the same moment
            raise

    def give_back(self) -> None:
        """End a turn, and begin the next one."""
        while self._waiting:
            caller = min(self._waiting, key=lambda who: self._last[who])
            lane = self._waiting[caller]
            mine = lane.popleft()
            if not lane:
                del self._waiting[caller], self._last[caller]
            if not mine.cancelled():
                self.given += 1
                if lane:
                    self._last[caller] = self.given
                mine.set_result(self.given)
                return
        self._free += 1
