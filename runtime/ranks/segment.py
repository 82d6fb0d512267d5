"""The memory that all ranks of a model map: the plans, words of each rank, and what they exchange within a launch.

Rank 0 writes a plan into its ring slot and then stores the launch's number into LAUNCHED; nothing else starts a
launch. Each word and each array by rank has one writer, that rank. LAUNCHED is written by rank 0. Any rank may set
ABORT to 1, and none resets it. A process with a GPU can register the same mapping with its driver (cudaHostRegister):
its GPU then reads plans and writes marks here.

The order of stores is relied upon: what a process stores before a word is seen before that word. x86-64 promises this.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import STATUS_WORDS, Allocate, RingLayout, RingMemory, allocate_rings, zeros
from runahead.runtime.rounding import ceil_div

START_LIMIT_S: Final = 1800.0  # of one wait for a rank while ranks load weights and compile kernels
EXCHANGE_SLOTS: Final = 3  # buffers of an exchange, in turn: a rank is at most two steps ahead of any other
_LINE: Final = 64  # bytes of a cache line: no two ranks write to the same one

_SPINS: Final = 50  # tries before the first pause

# Words of the first rank.
LAUNCHED: Final = 0  # number of the newest launch whose plan is there
ABORT: Final = 1  # not 0: every rank stops where it waits
# Words of each rank, a line of memory each.
SAMPLED, TAIL, ENDED = range(3)  # marks, as `Device.sampled`, `Device.in_tail` and `Device.ended`
FAULT: Final = 3  # the exchange step at which the rank gave up waiting, 0: none
FAULT_PEER: Final = 4  # the rank that it waited for
STEP: Final = 5  # the exchange step that the rank has written its part of
WAITED: Final = 6  # ns that the rank has waited for others within exchanges
_WORDS: Final = 8


class SegmentLayout(msgspec.Struct, frozen=True):
    """What the size of the segment follows from. ranks: how many. numbers: float32, that a rank hands over in one step
    of an exchange; a longer array takes several."""

    ranks: int
    rings: RingLayout
    numbers: int


class _Carver:
    """Makes arrays one behind the other in one memory, each at the start of a cache line. memory: None only counts."""

    def __init__(self, memory: memoryview | None) -> None:
        self._memory = memory
        self.used = 0

    def __call__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
        count, begin = math.prod(shape), self.used
        self.used += ceil_div(count * np.dtype(dtype).itemsize, _LINE) * _LINE
        if self._memory is None:
            return np.zeros(0, dtype)
        return np.frombuffer(self._memory, dtype, count, begin).reshape(shape)


@dataclass(frozen=True, slots=True)
class SegmentViews:
    """The arrays of a segment."""

    host: NDArray[np.int64]  # [words] LAUNCHED, ABORT
    words: NDArray[np.int64]  # [ranks, words]
    tags: NDArray[np.int64]  # [EXCHANGE_SLOTS, ranks, words] which exchange a part belongs to, in the first word
    plan: NDArray[np.int32]  # [slots, plan_words]
    bulk: NDArray[np.int32]  # [slots, bulk_words]
    finite: NDArray[np.int8]  # [ranks, slots, rows]
    status: NDArray[np.int32]  # [ranks, slots, STATUS_WORDS]
    stamps: NDArray[np.int64]  # [ranks, 3, slots] start_ns, end_ns, idle_ns
    parts: NDArray[np.float32]  # [EXCHANGE_SLOTS, ranks, numbers]


def _carved(layout: SegmentLayout, carve: _Carver) -> SegmentViews:
    ranks, rings = layout.ranks, layout.rings
    return SegmentViews(
        host=carve((_WORDS,), np.int64),  # type: ignore[arg-type]
        words=carve((ranks, _WORDS), np.int64),  # type: ignore[arg-type]
        tags=carve((EXCHANGE_SLOTS, ranks, _WORDS), np.int64),  # type: ignore[arg-type]
        plan=carve((rings.slots, rings.plan_words), np.int32),  # type: ignore[arg-type]
        bulk=carve((rings.slots, rings.bulk_words), np.int32),  # type: ignore[arg-type]
        finite=carve((ranks, rings.slots, rings.rows), np.int8),  # type: ignore[arg-type]
        status=carve((ranks, rings.slots, STATUS_WORDS), np.int32),  # type: ignore[arg-type]
        stamps=carve((ranks, 3, rings.slots), np.int64),  # type: ignore[arg-type]
        parts=carve((EXCHANGE_SLOTS, ranks, layout.numbers), np.float32),  # type: ignore[arg-type]
    )


def segment_bytes(layout: SegmentLayout) -> int:
    carver = _Carver(None)
    _carved(layout, carver)
    return carver.used


class Segment:
    """The segment as one process sees it. memory: as many bytes as `segment_bytes`, all 0 before the first use."""

    def __init__(self, layout: SegmentLayout, memory: memoryview, launched: int = 0) -> None:
        self.layout = layout
        self.views = _carved(layout, _Carver(memory))
        self._launched = launched

    def begin(self) -> None:
        """Set the marks to the launch before the first one. By the first rank, before any other maps the segment."""
        self.views.host[LAUNCHED] = self._launched
        self.views.words[:, (SAMPLED, TAIL, ENDED)] = self._launched

    @property
    def aborted(self) -> bool:
        return bool(self.views.host[ABORT])

    def abort(self) -> None:
        """Every rank stops where it waits."""
        self.views.host[ABORT] = 1

    def marks(self, rank: int) -> NDArray[np.int64]:
        """int64 [3], SAMPLED, TAIL and ENDED of a rank, which its device writes."""
        return self.views.words[rank, : ENDED + 1]

    def rings(self, rank: int, allocate: Allocate = zeros) -> RingMemory:
        """A rank's rings. Plans and bulk are the segment's, and what each rank leaves of a launch; results of S are in
        memory of the process, of which only the first rank's are read. allocate: makes the latter."""
        views, own = self.views, allocate_rings(replace(self.layout.rings, plan_words=0, bulk_words=0), allocate)
        start_ns, end_ns, idle_ns = views.stamps[rank]
        return replace(
            own, layout=self.layout.rings, plan=views.plan, bulk=views.bulk, finite=views.finite[rank],
            status=views.status[rank], start_ns=start_ns, end_ns=end_ns, idle_ns=idle_ns,
            rank_stamps=views.stamps[1:, :2], rank_waited_ns=views.words[:, WAITED],
        )  # fmt: skip


def pause_after(tries: int, pauses: Sequence[tuple[float, float]]) -> float:
    """Return the seconds to sleep before reading another rank's word again, 0 for the first tries. tries: failed reads
    so far. pauses: (last try, seconds), ascending."""
    return next(pause for most, pause in ((_SPINS, 0.0), *pauses) if tries <= most)


def make_memory(layout: SegmentLayout) -> tuple[int, memoryview]:
    """A new segment's descriptor and its mapping. It never has a name, so that nothing is left of it once every process
    that maps it has ended, however that was. Raises OSError where memory is short."""
    descriptor = os.memfd_create("runahead-ranks", os.MFD_CLOEXEC)
    try:
        size = segment_bytes(layout)
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)  # a lack of memory is an error now and no signal later
        return descriptor, memoryview(mmap.mmap(descriptor, size))
    except BaseException:
        os.close(descriptor)
        raise


def map_memory(descriptor: int, layout: SegmentLayout) -> memoryview:
    """The mapping of a segment that another process has made. Closes the descriptor. Raises OSError, and ValueError
    where the segment has another size."""
    try:
        size = os.fstat(descriptor).st_size
        if size != segment_bytes(layout):
            raise ValueError(f"the ranks' segment has {size} bytes; its layout takes {segment_bytes(layout)}")
        return memoryview(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)
