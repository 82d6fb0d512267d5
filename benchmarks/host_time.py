"""The engine's host time a launch on the null device: plan, stage, launch, commit, publish, and nothing else.

The device computes nothing and is done at once, so every microsecond between two launches is the host's. Published
frames are encoded and written to a socket that another process drains.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuda_graphs.rings import RingLayout, allocate_rings
from cuda_graphs.simulated_device import SimulatedDevice
from runtime import messages as m
from runtime.block_pool import BlockPool
from runtime.engine import Engine
from runtime.hash_program import NullProgram
from runtime.ledger import Ledger
from runtime.plan import PLAN_WORDS
from runtime.request import MAX_STOP_IDS, SamplingParams, StoppingParams
from runtime.rows import Rows
from runtime.scheduler import Release, Scheduler, SchedulerLimits

GOALS_US = {1: 100, 8: 120, 64: 150, 256: 250}
_CONTEXT = 8192
_BLOCK = 16


class DrainedLinks:
    """One front end behind a socket that another process reads to nowhere."""

    def __init__(self, rows: int, max_tokens: int) -> None:
        ours, theirs = socket.socketpair()
        self._drain = subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)
        theirs.close()
        self._sock = ours
        stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = np.array([5, 6, 7], np.int32).tobytes()
        self._inbox: list[tuple[int, m.ToEngine | None]] = [
            (1, m.Submit(handle, f"r{handle}", prompt, SamplingParams(), stopping)) for handle in range(1, rows + 1)
        ]

    def receive(self) -> Sequence[tuple[int, m.ToEngine | None]]:
        arrived, self._inbox = self._inbox, []
        return arrived

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        self._sock.sendall(m.encode_frame(message))

    def wake_fds(self) -> Sequence[int]:
        return ()

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self._sock.close()
        self._drain.wait(timeout=10)


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds a launch."""

    rows: int
    median_us: float
    p90_us: float
    goal_us: float


def measure(rows: int, launches: int = 3000, run_ahead: int = 2) -> HostTime:
    """Steady decode of `rows` rows, block boundaries included: one turn of the loop is one launch."""
    bulk = 1 << 16
    rings = allocate_rings(RingLayout(run_ahead + 2, PLAN_WORDS, bulk, rows, 1))
    device = SimulatedDevice(NullProgram(rings, max_rows=rows, token=5), rings)
    blocks = rows * (_CONTEXT // _BLOCK) + 1
    limits = SchedulerLimits(_CONTEXT, 1000, (1,), 128, 1024, PLAN_WORDS, bulk)
    ledger: Ledger[Release] = Ledger(run_ahead, 512)
    scheduler = Scheduler(limits, Rows(rows, MAX_STOP_IDS), BlockPool(blocks, _BLOCK), ledger)
    links = DrainedLinks(rows, _CONTEXT - 8)
    engine = Engine(device, scheduler, links, max_queue=rows)
    while scheduler.counters["generated_tokens"] < 20 * rows:
        engine.turn()
    times: list[float] = []
    first = ledger.launched
    while ledger.launched < first + launches:
        before, begun = ledger.launched, time.perf_counter()
        engine.turn()
        spent = time.perf_counter() - begun
        times += [spent / max(1, ledger.launched - before)] * (ledger.launched - before)
    links.close()
    p90 = statistics.quantiles(times, n=10)[-1]
    return HostTime(rows, 1e6 * statistics.median(times), 1e6 * p90, GOALS_US[rows])


def main() -> None:
    """Print the table."""
    print(f"{'rows':>5} {'median µs':>10} {'p90 µs':>8} {'goal µs':>8}")
    for rows in GOALS_US:
        found = measure(rows)
        print(f"{found.rows:>5} {found.median_us:>10.0f} {found.p90_us:>8.0f} {found.goal_us:>8.0f}")


if __name__ == "__main__":
    main()
