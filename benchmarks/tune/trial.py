"""What both tuners share: a candidate's time in a captured graph, and compiling many candidates side by side."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

import torch

READ_BYTES_PER_S: Final = 4.6e12  # one H200
_WORKERS: Final = 14
_ROUNDS: Final = 3
_REPLAYS: Final = 6


def _replays_us(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / _REPLAYS


def graph_us(work: Callable[[], None], hopeless: float = float("inf")) -> float:
    """Microseconds of what `work` enqueues, replayed from a graph: a median; infinite where one look shows more than
    `hopeless`. Raises what `work` raises."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    if _replays_us(graph) > hopeless:
        return float("inf")
    return statistics.median(_replays_us(graph) for _ in range(_ROUNDS))


def compile_side_by_side(module: str, flags: Sequence[str]) -> None:
    """Run the module with `--compile i/n` in n processes. What they compile lies in Triton's cache afterwards."""
    workers = min(_WORKERS, os.cpu_count() or 1)
    running = [
        subprocess.Popen([sys.executable, "-m", module, *flags, "--compile", f"{i}/{workers}"]) for i in range(workers)
    ]
    for worker in running:
        worker.wait()


def part_of(compile_flag: str | None) -> slice:
    """Which candidates this process looks at: all, or every n-th from the i-th on, of a flag `i/n`."""
    if compile_flag is None:
        return slice(None)
    first, step = map(int, compile_flag.split("/"))
    return slice(first, None, step)
