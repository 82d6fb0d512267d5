"""A few threads for work that comes in turns: callers take turns, however much each of them has waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol


class Work(Protocol):
    """Something to be done in one turn or several, each on a thread of the pool."""

    @property
    def is_long(self) -> bool:
        """The next turn takes much longer than others'."""

    def turn(self) -> bool:
        """Does a part, and says whether it was the last. What it raises ends the work."""


@dataclass(slots=True, eq=False)
class _Job:
    caller: int
    work: Work
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True)
class _Lane:
    """A caller's. last_turn: number of the turn that the caller had last, or came after. jobs: those that wait for a
    turn. count: of all that have not ended."""

    last_turn: int
    jobs: deque[_Job] = field(default_factory=deque)
    count: int = 0


class TurnPool:
    """Used on one event loop. workers: its threads, two at least: long turns have all but one of them at most, so that
    others go on beside them.

    Of those who wait, the caller has the next turn whose last one was longest ago. Of one caller's work the oldest goes
    on first. Work whose caller does not wait for it any more gets no further turn.
    """

    def __init__(self, workers: int, name: str) -> None:
        assert workers > 1
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._free = workers
        self._long = workers - 1  # long turns that may begin
        self._turns = 0  # that have begun so far
        self._lanes: dict[int, _Lane] = {}  # by caller, of those who have work that has not ended

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a turn."""
        return sum(len(lane.jobs) for lane in self._lanes.values())

    async def do(self, caller: int, work: Work) -> None:
        """Returns when the work is done. Raises what its turn raises. If cancelled, the turn that has begun is the
        last."""
        job = _Job(caller, work)
        lane = self._lanes.setdefault(caller, _Lane(self._turns))
        lane.count += 1
        lane.jobs.append(job)
        self._begin_turns()
        try:
            await job.ended
        finally:
            lane.count -= 1
            if job in lane.jobs:
                lane.jobs.remove(job)
            if not lane.count:
                del self._lanes[caller]

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin_turns(self) -> None:
        while self._free and (lane := self._next()) is not None:
            job = lane.jobs.popleft()
            self._turns += 1
            lane.last_turn = self._turns
            is_long = job.work.is_long
            self._free -= 1
            self._long -= is_long
            turn = asyncio.get_running_loop().run_in_executor(self._threads, job.work.turn)
            turn.add_done_callback(partial(self._after, job, is_long))

    def _next(self) -> _Lane | None:
        """Whose turn it is. Long ones wait, and let others pass, while there are as many as there may be."""
        lanes = [lane for lane in self._lanes.values() if lane.jobs and (self._long or not lane.jobs[0].work.is_long)]
        return min(lanes, key=lambda lane: lane.last_turn, default=None)

    def _after(self, job: _Job, is_long: bool, turn: asyncio.Future[bool]) -> None:
        """On the event loop, when a turn has ended."""
        self._free += 1
        self._long += is_long
        if not job.ended.done():
            if turn.cancelled():
                job.ended.cancel()
            elif (error := turn.exception()) is not None:
                job.ended.set_exception(error)
            elif turn.result():
                job.ended.set_result(None)
            else:
                self._lanes[job.caller].jobs.appendleft(job)
        self._begin_turns()
