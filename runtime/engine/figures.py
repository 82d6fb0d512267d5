"""Figures of the chain, from launches that have retired: how much overlapped, how long the device waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from runahead.cuda_graphs.rings import RingMemory
from runahead.cuda_graphs.shape import LaunchShape
from runahead.runtime.scheduler.ledger import Launch


def kind_of(shape: LaunchShape) -> str:
    """decode, mixed or closing."""
    if shape.is_closing:
        return "closing"
    return "decode" if shape.is_decode else "mixed"


@dataclass(slots=True)
class EventCount:
    """Lifecycle events of one kind, and what the next launch said of the chain: see `EventStats`."""

    count: int = 0
    held: int = 0
    idle: int = 0


@dataclass(slots=True)
class Figures:
    """Times are seconds on the engine's clock, `_ns` on the device's."""

    launches_by_kind: Counter[str] = field(default_factory=Counter)
    launches_by_depth: Counter[int] = field(default_factory=Counter)
    depth_max: int = 0
    held_back: int = 0  # times a launch was not queued because of a bound on launches with prompts alone
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
        """A launch was enqueued as the `depth`-th uncommitted one."""
        self.launches_by_kind[kind_of(launch.shape)] += 1
        self.launches_by_depth[depth] += 1
        if depth > self.depth_max:
            self.depth_max = depth

    def lifecycle(self, events: Mapping[str, int], launch: Launch) -> None:
        """These happened since the launch before this one was enqueued."""
        for kind, count in events.items():
            event = self.events.setdefault(kind, EventCount())
            event.count += count
            event.held += count * launch.overlapped
            event.idle += count * launch.first

    def retire(self, launch: Launch, rings: RingMemory) -> None:
        """Read a retired launch's stamps before its ring slot is used again."""
        ring_slot = rings.slot(launch.number)
        start, end = int(rings.start_ns[ring_slot]), int(rings.end_ns[ring_slot])
        self.retired += 1
        self.overlapped += launch.overlapped
        self.firsts_after_idle += launch.first
        self.busy_ns += end - start
        inside = int(rings.idle_ns[ring_slot])  # at most, by the host's clock, on which a launch may seem to be longer
        self.idle_inside_ns += inside if inside < end - start else end - start
        if not launch.first:
            self.idle_ns += max(0, start - self._previous_end_ns)
        self._previous_end_ns = end

    def barrier(self, reason: str, seconds: float) -> None:
        """The chain was drained for a reason."""
        self.barriers[reason] += 1
        self.barrier_s[reason] = self.barrier_s.get(reason, 0.0) + seconds

    @property
    def overlap_ratio(self) -> float:
        """Overlapped launches over those that could have been; 0 before the first."""
        could = self.retired - self.firsts_after_idle
        return self.overlapped / could if could else 0.0
