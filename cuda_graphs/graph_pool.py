"""Captured graphs by what they hold: a whole decode launch, or a piece of one, for a bucket of rows, a form of sampling
and a number of drafts."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from runahead.cuda_graphs.shape import Form

_SMALL_BUCKETS: Final = (1, 2, 4, 8)
_BUCKET_STEP: Final = 8  # between small buckets and _WIDE_FROM rows
_WIDE_FROM: Final = 64
_WIDE_STEP: Final = 32


class Piece(enum.StrEnum):
    """What a graph holds."""

    LAUNCH = "launch"  # S, apply and F
    SAMPLE = "sample"  # S alone, for launches whose F is not a decode step, or has another number of drafts
    FORWARD = "forward"  # apply and F, for decode launches whose S looks at another number of drafts


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Which graph: rows is the bucket that holds both the sample rows and the rows of F. drafts: of a row, those that S
    looks at as well as those that F holds. A FORWARD has the form PLAIN."""

    piece: Piece
    rows: int
    form: Form
    drafts: int = 0


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """Row counts that graphs are captured for, ascending; the last is `max_rows`."""
    steps = [*_SMALL_BUCKETS, *range(16, _WIDE_FROM, _BUCKET_STEP), *range(_WIDE_FROM, max_rows, _WIDE_STEP)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)


class GraphPool:
    """CUDA graphs that share one memory pool, which is safe because they replay one after the other on one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: GraphKey, work: Callable[[], None]) -> None:
        """Record what `work` enqueues. It must have run before: nothing may be compiled or loaded during a capture."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            work()
        graph.instantiate()
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> None:
        """Enqueue the graph on the current stream. Never blocks."""
        self._graphs[key].replay()

    def nodes(self, key: GraphKey) -> int:
        """How many nodes a graph has."""
        graph = ctypes.c_void_p(self._graphs[key].raw_cuda_graph())
        count = ctypes.c_size_t(0)
        error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(graph, None, ctypes.byref(count))
        if error:
            raise RuntimeError(f"the driver could not count the nodes of {key}: error {error}")
        return count.value

    def clear(self) -> None:
        """Give the graphs and their memory back. Only while nothing is in flight."""
        self._graphs.clear()
