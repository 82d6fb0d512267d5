"""Seconds as the engine counts them here, and a device that takes some: they pass when the script says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from runahead.cuda_graphs.device import NEVER, LaunchShape, Program
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.plan import shape_of
from tests.cuda_graphs.simulated_device import Schedule, SimulatedDevice, seeded_tails

_BETWEEN_PAUSES: Final = 40  # waits at least


class Clock:
    """now: seconds. Steps are sums of powers of two, so that no sum of them is rounded."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """So much later."""
        self.now += seconds


class TimedDevice(SimulatedDevice):
    """Does nothing for `pause_s` now and then, and for ever once it is stalled: a wait for it ends when its time is up.

    pause_s: 0 is never. seed: of when it pauses, and where tails begin. pauses: how many are over. rests: waits that
    ended without a mark.
    work: tokens and chunks that requests have received, set after construction. No pause begins before it has grown
    since the last one began, so that two pauses never meet in one wait of the watchdog for progress.
    """

    def __init__(
        self, program: Program, rings: RingMemory, schedule: Schedule, clock: Clock, *, pause_s: float, seed: int,
        launched: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(program, rings, schedule, launched=launched, tails=seeded_tails(seed))
        self.is_stalled = False
        self.pauses = 0
        self.rests = 0
        self._clock = clock
        self._pause_s = pause_s
        self._left_s = 0.0
        self.work: Callable[[], int] = lambda: 0
        self._work_paused = -1  # when the last pause began
        self._dice = random.Random(seed)
        self._waits_until_pause = 0
        self._plan_pause()

    def launch(self, shape: LaunchShape) -> None:
        """Who has the plan's bytes and nothing else would launch the same."""
        assert shape_of(self.rings.plan[self.rings.slot(shape.number)]) == shape, "the plan says another shape"
        super().launch(shape)

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        self._begin_pause()
        if self._is_resting and self._fault is None:
            slept = timeout_s if self.is_stalled else min(timeout_s, self._left_s)
            self._clock.pass_by(slept)
            self._left_s -= min(slept, self._left_s)
            self.pauses += not self._is_resting
            if self._is_resting:
                self.rests += 1
                self.counters.waits += 1
                return
        super().wait(sampled, ended, wake_fds, timeout_s, in_tail)

    @property
    def _is_resting(self) -> bool:
        return self.is_stalled or self._left_s > 0

    def _begin_pause(self) -> None:
        self._waits_until_pause -= 1
        if self._pause_s and self._waits_until_pause <= 0 and self.work() != self._work_paused:
            self._left_s, self._work_paused = self._pause_s, self.work()
            self._plan_pause()

    def _plan_pause(self) -> None:
        self._waits_until_pause = self._dice.randint(_BETWEEN_PAUSES, 3 * _BETWEEN_PAUSES)

    def _run(self, steps: int) -> None:
        super()._run(0 if self._is_resting else steps)
