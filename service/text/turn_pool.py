"""A thread pool in which callers take turns, however much work each has."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol

from runahead.service.workers.caller_turns import Turns


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
        """Run one turn and return whether it was the last. numbers: of the work's last turns. A long turn first waits
        for its place, and lets others pass meanwhile.
        """
        with ExitStack() as taken:
            for turns in (self._long_turns, self._turns) if work.is_long else (self._turns,):
                # Work that holds a long place goes before the caller's other work, which waits for it.
                before = numbers.get(turns, turns.given if work.is_long else None)
                numbers[turns] = await turns.take(caller, before)
                taken.callback(turns.give_back)
            loop = asyncio.get_running_loop()
            turn = loop.run_in_executor(self._threads, work.turn)
            give_back = taken.pop_all().close
        turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())  # its caller may be gone
        shielded = asyncio.shield(turn)
        # Given back once the work itself may wait for its next turn, so that it is among those who are chosen from.
        turn.add_done_callback(lambda _: loop.call_soon(give_back))
        return await shielded
