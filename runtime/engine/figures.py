"""Figures of the chain, latencies of requests, times of the loop, and a record of the newest launches.

The record is always on, so that a trace shows what has just happened. A launch costs a few clock readings and one
tuple.
"""

from __future__ import annotations

import bisect
import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import LaunchShape
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.scheduler.drafts import DraftPolicy, tokens_per_launch
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.steady_decode import TokenTimes
from runahead.runtime.wire.figures import BOUNDS_S, MAX_TRACED, LaunchTimes, Trace

_WAITS: Final = 4 * MAX_TRACED
_BOUNDS: Final = np.array(BOUNDS_S)
_BUCKETS: Final = len(BOUNDS_S) + 1


def kind_of(shape: LaunchShape) -> str:
    """Return decode, mixed or closing."""
    if shape.is_decode:
        return "decode"
    return "mixed" if shape.rows else "closing"


@dataclass(slots=True)
class EventCount:
    """Counts of one kind of lifecycle event: see `EventStats`."""

    count: int = 0
    held: int = 0
    idle: int = 0


@dataclass(slots=True)
class Figures:
    """Figures of launches. Times are seconds on the engine's clock, `_ns` on the device's."""

    launches_by_kind: Counter[str] = field(default_factory=Counter)
    launches_by_depth: Counter[int] = field(default_factory=Counter)
    depth_max: int = 0
    held_back: int = 0  # times when only a bound on launches with prompts kept a launch from the queue
    retired: int = 0
    overlapped: int = 0
    firsts_after_idle: int = 0
    busy_ns: int = 0
    idle_ns: int = 0  # between launches
    idle_inside_ns: int = 0  # of busy_ns
    events: dict[str, EventCount] = field(default_factory=dict)
    barriers: Counter[str] = field(default_factory=Counter)
    barrier_s: dict[str, float] = field(default_factory=dict)
    _previous_end_ns: int = 0

    def enqueued(self, launch: Launch, depth: int) -> None:
        """Count a launch that was enqueued as the `depth`-th uncommitted one."""
        self.launches_by_kind[kind_of(launch.shape)] += 1
        self.launches_by_depth[depth] += 1
        if depth > self.depth_max:
            self.depth_max = depth

    def lifecycle(self, events: Mapping[str, int], launch: Launch) -> None:
        """Count the events since the previous launch was enqueued."""
        for kind, count in events.items():
            event = self.events.setdefault(kind, EventCount())
            event.count += count
            event.held += count * launch.overlapped
            event.idle += count * launch.first

    def retire(self, launch: Launch, rings: RingMemory, ring_slot: int) -> None:
        """Read a retired launch's stamps before its ring slot is reused."""
        start, end = int(rings.start_ns[ring_slot]), int(rings.end_ns[ring_slot])
        self.retired += 1
        self.overlapped += launch.overlapped
        self.firsts_after_idle += launch.first
        self.busy_ns += end - start
        inside = int(rings.idle_ns[ring_slot])  # bounded: on the host's clock a launch may seem longer
        self.idle_inside_ns += inside if inside < end - start else end - start
        if not launch.first:
            self.idle_ns += max(0, start - self._previous_end_ns)
        self._previous_end_ns = end

    def barrier(self, reason: str, seconds: float) -> None:
        """Count a drain of the chain by its reason."""
        self.barriers[reason] += 1
        self.barrier_s[reason] = self.barrier_s.get(reason, 0.0) + seconds

    @property
    def overlap_ratio(self) -> float:
        """Overlapped launches as a fraction of launches that could overlap; 0 before the first."""
        could = self.retired - self.firsts_after_idle
        return self.overlapped / could if could else 0.0


class Histogram:
    """A histogram. counts: int64 [len(BOUNDS_S) + 1]; bucket i has times above bound i - 1 up to bound i, the last one
    those above every bound. sum_s: the sum in seconds.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BUCKETS, np.int64)
        self.sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Add the same time, `times` times."""
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += times
        self.sum_s += seconds * times

    def add_each(self, seconds: NDArray[np.float64]) -> None:
        """Add several times, [n]."""
        self.counts += np.bincount(_BOUNDS.searchsorted(seconds), minlength=_BUCKETS)
        self.sum_s += float(np.add.reduce(seconds))


class Latencies:
    """Latencies in seconds on the engine's clock, until a launch's tokens are sent.

    `inter_token` has a time for every token but the first of each request: since the request's previous token,
    including pauses, evictions and other requests' launches. Several tokens of a row in one launch come together: the
    first one has the whole time, the others 0, so that a request's times add up to the time between its first and its
    last token. drafts: a launch may bring several tokens of a row. `queue` has a time for each request that got a row,
    `end_to_end` for each request that ended after its first token, unless its client was gone.
    """

    def __init__(self, times: TokenTimes, drafts: int) -> None:
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.queue = Histogram()
        self.end_to_end = Histogram()
        self._times = times
        self._drafts = drafts

    def tokens(self, commit: Commit, has_firsts: bool, now: float) -> None:
        """Count a launch's tokens, which are sent at `now`. has_firsts: some are the first of their requests."""
        if not commit.slots.size:
            return
        since = self._times.advance(commit.slots, now)
        if isinstance(since, float) and not has_firsts and not self._drafts:
            self.inter_token.add(since, commit.slots.size)
            return
        waited = np.full(commit.slots.size, since) if isinstance(since, float) else since
        if self._drafts:
            waited[1:][commit.slots[1:] == commit.slots[:-1]] = 0.0
        self.inter_token.add_each(waited[~commit.firsts] if has_firsts else waited)


class LoopTimes:
    """Times of the loop in seconds since construction, on `clock`. each: called with every wait's start and end."""

    def __init__(self, clock: Callable[[], float], each: Callable[[float, float], None]) -> None:
        self._clock = clock
        self._each = each
        self._started_at = clock()
        self._waited_s = 0.0  # on marks and arrivals
        self._nothing_to_do_s = 0.0  # of these, on arrivals alone

    def waited(self, begun: float) -> float:
        """Count a wait for a mark or an arrival, until now. Returns its seconds."""
        now = self._clock()
        self._each(begun, now)
        self._waited_s += now - begun
        return now - begun

    def had_nothing_to_do(self, begun: float) -> None:
        """Count a wait for an arrival alone, until now."""
        self._nothing_to_do_s += self.waited(begun)

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_at

    @property
    def work_s(self) -> float:
        """Seconds in which there was something to do."""
        return self.uptime_s - self._nothing_to_do_s

    @property
    def host_s(self) -> float:
        """Seconds without any wait."""
        return self.uptime_s - self._waited_s


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

    def retired(self, launch: Launch, ended_s: float, rings: RingMemory, slot: int) -> None:
        """Record a retired launch before its ring slot is reused. ended_s: when the loop saw its end."""
        number = launch.number
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
