"""Every n launches a snapshot of the engine is logged.

In the mode `events` it is made from marks that have passed, and the chain goes on. In the mode `barrier` the chain
drains before the logged launch, so that the time between two barriers is exactly that of the launches between them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.engine.figures import Figures, LoopTimes
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.scheduler.drafts import DraftPolicy, tokens_per_launch
from runahead.runtime.scheduler.ledger import Launch


class LogMode(enum.StrEnum):
    EVENTS = "events"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the engine's start, after so many launches. Times are seconds.

    drafted, accepted: drafts by their place in a run, int64 [most K], as the scheduler counts them. work_s: on the
    engine's clock, while there was something to do. host_s: of that, without waits. device_busy_s, device_idle_s: on
    the device's clock, idle between launches.
    """

    launch: int
    tokens: int
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    work_s: float
    host_s: float
    device_busy_s: float
    device_idle_s: float


def totals(launch: int, tokens: int, drafts: DraftPolicy, figures: Figures, times: LoopTimes) -> Totals:
    """After this launch and so many tokens, from those who count the rest."""
    return Totals(
        launch,
        tokens,
        drafts.drafted.copy(),
        drafts.accepted.copy(),
        times.work_s,
        times.host_s,
        figures.busy_ns / 1e9,
        figures.idle_ns / 1e9,
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One logged launch, and the launches since the snapshot before. Times are seconds.

    rows, launch_s: of the logged launch; launch_s from the start of its S to the end of its F. launches, tokens: since
    the snapshot before, or the barrier before. tokens_per_launch: that one of these brought of a row, on average over
    those that brought any; 0 where none did. drafted, accepted: drafts that they have looked at, and right ones, by
    their place in a run. step_s, host_s, device_s: of these launches, for one on average: the whole step, what the
    engine's loop worked, what the device did.
    """

    launch: int
    rows: int
    launch_s: float
    launches: int
    tokens: int
    tokens_per_launch: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    step_s: float
    host_s: float
    device_s: float
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_fenced: int


class IntervalLog:
    """interval: launches from one snapshot to the next; 0: none is ever made. write: where snapshots go. begun: before
    the first launch."""

    def __init__(self, interval: int, mode: LogMode, write: Callable[[Snapshot], None], begun: Totals) -> None:
        self.interval = interval
        self.mode = mode
        self._write = write
        self._since = self._barrier = begun

    def is_logged(self, launch: int) -> bool:
        """A snapshot is made of this launch."""
        return self.interval > 0 and launch % self.interval == 0

    def drains_before(self, launch: int) -> bool:
        """The chain drains before this launch is planned."""
        return self.mode is LogMode.BARRIER and self.is_logged(launch)

    def drained(self, totals: Totals) -> None:
        """The chain was drained before a logged launch."""
        self._barrier = totals

    def retired(self, launch: Launch, launch_s: float, totals: Totals, pool: BlockPool) -> None:
        """A launch that is logged has retired."""
        until = self._barrier if self._barrier.launch > self._since.launch else totals
        launches, tokens = until.launch - self._since.launch, until.tokens - self._since.tokens
        drafted, accepted = until.drafted - self._since.drafted, until.accepted - self._since.accepted
        step_s = until.work_s - self._since.work_s
        if self.mode is LogMode.EVENTS:
            step_s = until.device_busy_s + until.device_idle_s
            step_s -= self._since.device_busy_s + self._since.device_idle_s
        self._write(
            Snapshot(
                launch=launch.number,
                rows=launch.row_slots.size,
                launch_s=launch_s,
                launches=launches,
                tokens=tokens,
                tokens_per_launch=tokens_per_launch(tokens, int(accepted.sum())),
                drafted=tuple(drafted.tolist()),
                accepted=tuple(accepted.tolist()),
                step_s=step_s / launches,
                host_s=(until.host_s - self._since.host_s) / launches,
                device_s=(until.device_busy_s - self._since.device_busy_s) / launches,
                blocks_free=pool.free,
                blocks_cached=pool.cached,
                blocks_owned=pool.owned,
                blocks_fenced=pool.fenced,
            )
        )
        self._since = until
