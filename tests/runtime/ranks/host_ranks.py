"""Ranks of one segment as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.kernels.ranks import Ranks
from runahead.runtime.ranks.exchange import HostRanks
from runahead.runtime.ranks.segment import Segment, SegmentLayout, segment_bytes

RINGS = RingLayout(4, 64, 64, 4, 4)
Found = TypeVar("Found")


def memory_of(ranks: int, numbers: int) -> tuple[SegmentLayout, memoryview]:
    layout = SegmentLayout(ranks, RINGS, numbers)
    return layout, memoryview(bytearray(segment_bytes(layout)))


def ranks_of(count: int, numbers: int = 96, limit_s: float = 60.0) -> list[HostRanks]:
    """Of one segment. numbers: fewer than most exchanges have, so that they take several steps."""
    layout, memory = memory_of(count, numbers)
    return [HostRanks(Segment(layout, memory), rank, limit_s) for rank in range(count)]


def on_each(ranks: list[HostRanks], work: Callable[[Ranks], Found]) -> list[Found]:
    """What each rank finds, each on a thread."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))
