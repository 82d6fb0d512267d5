"""Captured graphs, by key."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from runahead.cuda_graphs.buckets import GraphKey

_TIMED: Final = 3  # replays


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection. A collection could return memory to the driver, which would end the capture on the
    same thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _graph_of_random_state() -> torch.cuda.CUDAGraph:
    """Return a graph that is never captured and keeps the memory that torch's random state allocates for its first
    graph. If that memory ran out when a capture begins, torch 2.11 would abort the process as it frees the graph.

    Raises torch.OutOfMemoryError.
    """
    torch.empty(1, device="cuda")  # the allocator keeps its memory, and the random state's comes out of it
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(torch.cuda.default_generators[torch.cuda.current_device()])
    return graph


class GraphPool:
    """CUDA graphs that share one memory pool, which is safe because they replay one after another on one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._first = _graph_of_random_state()
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: GraphKey, work: Callable[[], None]) -> None:
        """Capture what `work` enqueues. It must have run before: nothing may be compiled or loaded during a capture."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        captured = torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local")
        with no_collection(), captured:
            work()
        graph.instantiate()
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> None:
        """Enqueue the graph on the current stream. Never blocks."""
        self._graphs[key].replay()

    def fastest_ms(self, key: GraphKey) -> float:
        """Replay the graph some times, wait for them, and return the least time of one in milliseconds."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times: list[float] = []
        for _ in range(_TIMED):
            begin.record(self._stream)
            with torch.cuda.stream(self._stream):
                self.replay(key)
            end.record(self._stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    def nodes(self, key: GraphKey) -> int:
        """Return the number of a graph's nodes."""
        graph = ctypes.c_void_p(self._graphs[key].raw_cuda_graph())
        count = ctypes.c_size_t(0)
        error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(graph, None, ctypes.byref(count))
        if error:
            raise RuntimeError(f"the driver could not count the nodes of {key}: error {error}")
        return count.value

    def clear(self) -> None:
        """Free the graphs and their memory. Only while nothing is in flight."""
        self._graphs.clear()
