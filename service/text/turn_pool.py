"""A few threads for work that comes in turns: callers take turns, however much each of them has waiting."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol

from runahead.service.workers.caller_turns import Turns


class Work(Protocol):
    """Something to be done in one turn or several, each on a thread of the pool."""

    @property
    def is_long(self) -> bool:
        """The next turn takes much longer than others'."""

    def turn(self) -> bool:
        """Does a part, and says whether it was the last. What it raises ends the work."""


class TurnPool:
    """Used on one event loop. workers: its threads, two at least: long turns have all but one of them at most, so that
    others go on beside them.

    Of those who wait, the caller has the next turn whose last one was longest ago. Of one caller's work the oldest goes
    on first. Work whose caller does not wait for it any more gets no further turn.
    """

    def __init__(self, workers: int, name: str) -> None:
        assert workers > 1
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._turns, self._long_turns = Turns(workers), Turns(workers - 1)

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a turn."""
        return self._turns.waiting + self._long_turns.waiting

    async def do(self, caller: int, work: Work) -> None:
        """Returns when the work is done. Raises what its turn raises. If cancelled, the turn that has begun is the
        last."""
        numbers: dict[Turns, int] = {}
        while not await self._turn(caller, work, numbers):
            pass

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, caller: int, work: Work, numbers: dict[Turns, int]) -> bool:
        """Whether it was the last. numbers: of the work's last turns. A long one takes a place among the long ones
        first, and lets others pass until then."""
        with ExitStack() as taken:
            for turns in (self._long_turns, self._turns) if work.is_long else (self._turns,):
                # Work that has a place among the long ones goes before the caller's other work: others wait for that.
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
