"""A record of the newest launches: when the host handled each, and when the device ran it.

It is always on, so that a trace shows what has just happened. A launch costs a few clock readings and one tuple.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.engine.figures import kind_of
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.wire.trace import MAX_TRACED, LaunchTimes, Trace

_WAITS: Final = 4 * MAX_TRACED


class _Retired(NamedTuple):
    launch: Launch
    planned: tuple[float, float, float, float]
    committed: tuple[float, float, float]
    ended_s: float
    start_ns: np.int64
    end_ns: np.int64
    idle_inside_ns: np.int64
    other_ranks_ns: NDArray[np.int64]  # [ranks - 1, 2]


class Recorder:
    """Times are seconds on the engine's clock."""

    def __init__(self) -> None:
        self._planned: dict[int, tuple[float, float, float, float]] = {}  # by launch: plan, stage, launch, enqueued
        self._committed: dict[int, tuple[float, float, float]] = {}  # by launch: commit, publish, published
        self._retired: deque[_Retired] = deque(maxlen=MAX_TRACED)
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WAITS)

    def enqueued(self, number: int, plan_s: float, stage_s: float, launch_s: float, enqueued_s: float) -> None:
        """Record the host's times of planning, staging and launching."""
        self._planned[number] = (plan_s, stage_s, launch_s, enqueued_s)

    def committed(self, number: int, commit_s: float, publish_s: float, published_s: float) -> None:
        """Record the host's times of committing and publishing."""
        self._committed[number] = (commit_s, publish_s, published_s)

    def waited(self, from_s: float, to_s: float) -> None:
        """Record a wait of the loop for a mark or an arrival."""
        self._waits.append((from_s, to_s))

    def retired(self, launch: Launch, ended_s: float, rings: RingMemory) -> None:
        """Record a retired launch before its ring slot is reused. ended_s: when the loop saw its end."""
        number, slot = launch.number, rings.slot(launch.number)
        planned, committed = self._planned.pop(number), self._committed.pop(number)
        device = rings.start_ns[slot], rings.end_ns[slot], rings.idle_ns[slot], rings.rank_stamps[:, :, slot].copy()
        self._retired.append(_Retired(launch, planned, committed, ended_s, *device))

    def trace(self, launches: int) -> Trace:
        """Return the newest `launches` retired launches, or all that are recorded."""
        newest = list(self._retired)[-launches:]
        if not newest:
            return Trace((), ())
        since_s = newest[0].planned[0]
        return Trace(tuple(map(_times, newest)), tuple(wait for wait in self._waits if wait[1] >= since_s))


def _times(retired: _Retired) -> LaunchTimes:
    launch = retired.launch
    plan_s, stage_s, launch_s, enqueued_s = retired.planned
    commit_s, publish_s, published_s = retired.committed
    return LaunchTimes(
        number=launch.number,
        kind=kind_of(launch.shape),
        rows=launch.row_slots.size,
        prompt_tokens=launch.prompt_tokens,
        overlapped=launch.overlapped,
        first=launch.first,
        plan_s=plan_s,
        stage_s=stage_s,
        launch_s=launch_s,
        enqueued_s=enqueued_s,
        commit_s=commit_s,
        publish_s=publish_s,
        published_s=published_s,
        ended_s=retired.ended_s,
        start_ns=int(retired.start_ns),
        end_ns=int(retired.end_ns),
        idle_inside_ns=int(min(retired.idle_inside_ns, retired.end_ns - retired.start_ns)),
        other_ranks_ns=tuple((start, end) for start, end in retired.other_ranks_ns.tolist()),
    )
