"""The simulated device: launches run when a schedule says so, on the caller's thread. No torch, no clock.

With the schedule `at_once` it is the null device of the benchmarks: work is over the moment it is enqueued.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import NEVER, DeviceCounters, DeviceError, LaunchShape, Program
from runahead.cuda_graphs.rings import RingMemory

# How many more steps the device takes whenever the host looks. A launch has two: S with its publication, then apply
# and F. One whose tail is late has a third.
Schedule = Callable[[], int]
# When the next launch is in its tail.
WITH_S, BEFORE_APPLY, AFTER_F = range(3)
Tails = Callable[[], int]


def at_once() -> int:
    """Everything enqueued runs whenever the host looks."""
    return 1 << 30


def seeded_schedule(seed: int) -> Schedule:
    """0 to 3 steps at a look, from a seed."""
    dice = random.Random(seed)
    return lambda: dice.choice((0, 0, 1, 1, 2, 3))


def early() -> int:
    """A launch is in its tail once it is sampled."""
    return WITH_S


def seeded_tails(seed: int) -> Tails:
    """Any place of the tail, from a seed."""
    dice = random.Random(f"{seed} tails")
    return lambda: dice.choice((WITH_S, BEFORE_APPLY, BEFORE_APPLY, AFTER_F, AFTER_F))


class SimulatedDevice:
    """Runs a `Program` step by step. `time_ns` counts steps, not time.

    launched: the number that the first launch comes after, as the program was told.
    """

    def __init__(
        self, program: Program, rings: RingMemory, schedule: Schedule = at_once, *, launched: int = 0,
        tails: Tails = early,
    ) -> None:  # fmt: skip
        self.rings = rings
        self.counters = DeviceCounters()
        self.buckets: tuple[int, ...] = ()
        self.mixed_buckets: tuple[int, ...] = ()
        self.calls_at_once = NEVER
        self._program = program
        self._schedule = schedule
        self._tails = tails
        self._place = WITH_S  # of the tail of the launch that runs
        self._queue: deque[LaunchShape] = deque()
        self._steps = 0
        self._sampled = self._tail = self._ended = launched
        self._fault: Exception | None = None

    def calls(self, shape: LaunchShape) -> int:
        return 1

    def launch(self, shape: LaunchShape) -> None:
        self._queue.append(shape)

    def sampled(self) -> int:
        self._run(self._schedule())
        return self._sampled

    def ended(self) -> int:
        self._run(self._schedule())
        return self._ended

    def in_tail(self) -> int:
        self._run(self._schedule())
        return self._tail

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        self.counters.waits += 1
        while self._queue and self._fault is None and not self._have_come(sampled, ended, in_tail):
            self._run(1)
        self._raise_fault()

    def _have_come(self, sampled: int, ended: int, in_tail: int) -> bool:
        return self._sampled > sampled or self._ended > ended or self._tail > in_tail

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self._program.read_rows()

    def close(self) -> None:
        self._queue.clear()

    def fail(self, error: Exception) -> None:
        """Make the next step fail, as a device error would."""
        self._fault = error

    def _run(self, steps: int) -> None:
        self._raise_fault()
        while steps > 0 and self._queue:
            shape = self._queue[0]
            slot = self.rings.slot(shape.number)
            self._steps += 1
            if self._sampled < shape.number:
                self.rings.start_ns[slot] = self._steps
                self._program.sample(shape)
                self._sampled = shape.number
                self._place = self._tails()
                self._tail += self._place == WITH_S
            elif self._tail < shape.number:
                if self._place == AFTER_F:
                    self._forward(shape)
                self._tail = shape.number
            else:
                if self._place != AFTER_F:
                    self._forward(shape)
                self.rings.end_ns[slot] = self._steps
                self._ended = shape.number
                self._queue.popleft()
            steps -= 1

    def _forward(self, shape: LaunchShape) -> None:
        self.counters.bytes_to_device += self._program.apply(shape)
        self._program.forward(shape)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise DeviceError(f"a launch failed: {self._fault}") from self._fault
