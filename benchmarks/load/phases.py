"""Calls made at a rate, whatever becomes of them, or in a circle by so many callers."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.load.arrivals import Arrival
from benchmarks.load.calls import Call, completed
from benchmarks.load.cases import asked
from runahead.v1 import GenerateRequest, GenerationServiceStub


@dataclass(slots=True)
class Phase:
    """What came of the calls. begun_s, seconds: the time within which calls were made, of the monotonic clock.

    warm_s: of it, the time at first in which what the service carries is not counted yet: it has to fill.
    late_s: by how much the client made each call later than it should have, for which the service can't be blamed.
    most_open: calls that were open at once.
    """

    begun_s: float
    seconds: float
    calls: list[Call] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    most_open: int = 0

    @property
    def warm_s(self) -> float:
        return min(5.0, self.seconds / 4)

    @property
    def counted_s(self) -> float:
        return self.seconds - self.warm_s

    @property
    def finished(self) -> list[Call]:
        """Calls that ended within the measured time."""
        begin, end = self.begun_s + self.warm_s, self.begun_s + self.seconds
        return [call for call in self.calls if call.is_finished and begin <= call.ended_s <= end]

    @property
    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.is_refused]

    @property
    def goodput(self) -> float:
        """Tokens a second of completions that came to their end."""
        return sum(len(call.tokens) for call in self.finished) / self.counted_s

    @property
    def mean_open(self) -> float:
        """Mean number of open calls, without refused ones."""
        return sum(call.ended_s - call.began_s for call in self.calls if not call.is_refused) / self.seconds


@dataclass(frozen=True, slots=True)
class Client:
    """Clients of the service. stubs: one for each connection. answers: expected tokens of each case, from an unloaded
    run."""

    stubs: Sequence[GenerationServiceStub]
    cases: Sequence[GenerateRequest]
    answers: Sequence[tuple[int, ...]]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def circle(self, callers: int, seconds: float, seed: int) -> Phase:
        """Each caller makes its next call when its last one has ended: as much as the service can do."""
        phase = Phase(time.monotonic(), seconds)

        async def caller(number: int) -> None:
            draws = random.Random(f"{seed} circle {number}")
            while time.monotonic() < phase.begun_s + seconds:
                await self._call(phase, number, draws.random())

        await asyncio.gather(*map(caller, range(callers)))
        return phase

    async def open_loop(self, arrivals: Sequence[Arrival], seconds: float) -> Phase:
        """Each call is made at its time, however many are open. Returns when all have ended."""
        phase, open_calls = Phase(time.monotonic(), seconds), set[asyncio.Task[None]]()
        for arrival in arrivals:
            at_s = phase.begun_s + arrival.at_s
            if (wait_s := at_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            phase.late_s.append(max(0.0, time.monotonic() - at_s))
            task = asyncio.create_task(self._call(phase, arrival.source, arrival.draw))
            open_calls.add(task)
            task.add_done_callback(open_calls.discard)
            phase.most_open = max(phase.most_open, len(open_calls))
        await asyncio.gather(*open_calls)
        return phase

    async def _call(self, phase: Phase, source: int, draw: float) -> None:
        case, number = int(draw * len(self.cases)), next(self._numbers)
        salt = f"call {number}" if number % 4 else ""  # every fourth may find its prompt in the cache
        call = await completed(self.stubs[source % len(self.stubs)], asked(self.cases[case], salt))
        phase.calls.append(call)
        if wrong := call.wrong(self.answers[case]):
            phase.wrong.append(f"case {case}: {wrong}")
