"""What the tuners share: a candidate's time in a captured graph, and compiling many candidates side by side."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Final

import torch

READ_BYTES_PER_S: Final = 4.6e12  # one H200
_WORKERS: Final = 14
_ROUNDS: Final = 3
_REPLAYS: Final = 6
# Python warns of other threads where a process is copied: libraries have begun them, and no copy needs them.
_COPIED_BESIDE: Final = "This process .* is multi-threaded"


def _replays_us(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / _REPLAYS


def graph_us(work: Callable[[], object], hopeless: float = float("inf")) -> float:
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


def compile_side_by_side(module: str, flags: Sequence[str], at_most: int = _WORKERS) -> None:
    """Run the module with `--compile i/n` in n processes. What they compile lies in Triton's cache afterwards."""
    workers = min(at_most, _WORKERS, os.cpu_count() or 1)
    running = [
        subprocess.Popen([sys.executable, "-m", module, *flags, "--compile", f"{i}/{workers}"]) for i in range(workers)
    ]
    for worker in running:
        worker.wait()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def ask_a_copy(question: Callable[[], int]) -> int:
    """The answer of a copy of this process, which may touch the GPU for it, as this one may not yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _COPIED_BESIDE, DeprecationWarning)
        answers, end = multiprocessing.Pipe(duplex=False)
        copy = multiprocessing.get_context("fork").Process(target=lambda: end.send(question()), daemon=True)
        copy.start()
    end.close()
    answer: int = answers.recv()
    copy.join()
    return answer


def compile_in_copies(compile_part: Callable[[slice], None], workers: int, seconds: float) -> list[int]:
    """Run `compile_part` with every n-th of the candidates in each of n copies of this process, which has not touched
    the GPU yet. A copy has already imported everything. One that is not done after so many seconds is ended.

    Returns the numbers of the copies that failed or were ended; what they lack is compiled when it is first run.
    """
    assert not torch.cuda.is_initialized(), "a process that has touched the GPU can't be copied"
    copies = multiprocessing.get_context("fork")
    running = [
        copies.Process(target=compile_part, args=(slice(i, None, workers),), daemon=True) for i in range(workers)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _COPIED_BESIDE, DeprecationWarning)
        for worker in running:
            worker.start()
    until = time.monotonic() + seconds
    for worker in running:
        worker.join(max(until - time.monotonic(), 0.0))
    failed = [i for i, worker in enumerate(running) if worker.exitcode != 0]
    for worker in running:
        worker.kill()
        worker.join()
    return failed


def part_of(compile_flag: str | None) -> slice:
    """Which candidates this process looks at: all, or every n-th from the i-th on, of a flag `i/n`."""
    if compile_flag is None:
        return slice(None)
    first, step = map(int, compile_flag.split("/"))
    return slice(first, None, step)
