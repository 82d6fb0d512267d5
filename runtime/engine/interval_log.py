"""Logs a snapshot of the engine every n launches.

In the mode `events` it is made from marks that have passed, without draining the chain. In the mode `barrier` the chain
drains before the logged launch, so that the time between two barriers is exactly the time of the launches between them.
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
    """Sums since the engine's start, up to a launch. Times are seconds.

    drafted, accepted: drafts by position, int64 [most K], as the scheduler counts them. work_s: on the engine's clock,
    while there was something to do. host_s: of that, without waits. device_busy_s, device_idle_s: on the device's
    clock, idle between launches.
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
    """Return the sums after this launch and these tokens."""
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
    """One logged launch, and averages over the launches since the previous snapshot. Times are seconds.

    rows, launch_s: of the logged launch; launch_s from the start of its S to the end of its F. launches, tokens: since
    the previous snapshot or barrier. tokens_per_launch: average tokens of a row in a launch that brought it any; 0
    without tokens. drafted, accepted: verified and accepted drafts by position. step_s, host_s, device_s: averages for
    one launch: the whole step, the loop's work, the device's work.
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
    """Makes the snapshots.

    interval: launches between two snapshots; 0: none are made. write: receives snapshots. begun: sums before the first
    launch.
    """

    def __init__(self, interval: int, mode: LogMode, write: Callable[[Snapshot], None], begun: Totals) -> None:
        self.interval = interval
        self.mode = mode
        self._write = write
        self._since = self._barrier = begun

    def is_logged(self, launch: int) -> bool:
        """Return whether a snapshot is made of this launch."""
        return self.interval > 0 and launch % self.interval == 0

    def drains_before(self, launch: int) -> bool:
        """Return whether the chain drains before this launch is planned."""
        return self.mode is LogMode.BARRIER and self.is_logged(launch)

    def drained(self, totals: Totals) -> None:
        """Record a drain before a logged launch."""
        self._barrier = totals

    def retired(self, launch: Launch, launch_s: float, totals: Totals, pool: BlockPool) -> None:
        """Write the snapshot of a logged launch that has retired."""
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
