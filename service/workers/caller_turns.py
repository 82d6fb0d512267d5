"""Fair queues: callers take turns, in a thread pool too, however much work each has."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol, TypeVar

T = TypeVar("T")


class Turns:
    """Up to `most` turns at a time. The next turn goes to the waiting caller whose last turn is the oldest; a
    caller's own work is first come, first served. Use it on one event loop.
    """

    def __init__(self, most: int = 1) -> None:
        self._free = most
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


class Work(Protocol):
    """Work of one or more turns, each on a thread of the pool."""

    @property
    def is_long(self) -> bool:
        """Whether the next turn takes much longer than others."""

    def turn(self) -> bool:
        """Do a part and return whether it was the last. An exception ends the work."""


class TurnPool:
    """Runs work on one event loop's behalf. workers: at least two threads; long turns never occupy the last one.

    The next turn goes to the waiting caller whose last turn is the oldest, and to that caller's oldest work. Work whose
    caller stopped waiting gets no further turn.
    """

    def __init__(self, workers: int, name: str) -> None:
        assert workers > 1
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._turns, self._long_turns = Turns(workers), Turns(workers - 1)

    @property
    def waiting(self) -> int:
        """Work that waits for a turn."""
        return self._turns.waiting + self._long_turns.waiting

    async def do(self, caller: int, work: Work) -> None:
        """Run the work to its end. Raises its turns' errors. Cancellation takes effect after the current turn."""
        numbers: dict[Turns, int] = {}
        while not await self._turn(caller, work, numbers):
            pass

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, caller: int, work: Work, numbers: dict[Turns, int]) -> bool:
        """Run one turn and return whether it was the last. numbers: of the work's last turns. Long work
        first waits in `_long_turns`, where other work passes it.
        """
        with ExitStack() as taken:
            for turns in (self._long_turns, self._turns) if work.is_long else (self._turns,):
                # Work in a long turn goes before the caller's other work, which waits for it.
                before = numbers.get(turns, turns.given if work.is_long else None)
                numbers[turns] = await turns.take(caller, before)
                taken.callback(turns.give_back)
            loop = asyncio.get_running_loop()
            turn = loop.run_in_executor(self._threads, work.turn)
            give_back = taken.pop_all().close
        turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())  # its caller may be gone
        shielded = asyncio.shield(turn)
        # Given back once the work may wait for its next turn, so that it can be chosen again.
        turn.add_done_callback(lambda _: loop.call_soon(give_back))
        return await shielded
