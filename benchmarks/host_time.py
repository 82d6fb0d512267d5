"""The engine's host time a launch on the null device: take, plan, stage, launch, commit, publish, and nothing else.

The device computes nothing and is done at once, so every microsecond of a turn is the host's. At depth 1 a turn of the
loop is one launch. The front end is a process of its own on the engine's real socket: it reads everything and drops it.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuda_graphs.rings import RingLayout, allocate_rings
from cuda_graphs.simulated_device import SimulatedDevice
from runtime import messages as m
from runtime.block_pool import BlockPool
from runtime.engine import Engine
from runtime.hash_program import NullProgram
from runtime.ledger import Ledger
from runtime.links import SocketLinks
from runtime.plan import PLAN_WORDS
from runtime.request import MAX_STOP_IDS, SamplingParams, StoppingParams
from runtime.rows import Rows
from runtime.scheduler import Release, Scheduler, SchedulerLimits

GOALS_US = {1: 100, 8: 120, 64: 150, 256: 250}
LAUNCHES = 3000
CONTEXT = 8192
BLOCK = 16
INFO = m.EngineInfo("null", "none", 1000, CONTEXT, (1,), -1, 256, 256, 2, BLOCK, 1, "null", "none", 0)


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds a launch."""

    rows: int
    median_us: float
    p90_us: float
    goal_us: float


def front_end(path: str, rows: int) -> None:
    """Ask for `rows` completions that outlast the measurement, and read until the engine is gone."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        stopping = StoppingParams(max_tokens=CONTEXT - 8, ignore_eos=True)
        prompt = np.array([5, 6, 7], np.int32).tobytes()
        for handle in range(1, rows + 1):
            sock.sendall(m.encode_frame(m.Submit(handle, f"r{handle}", prompt, SamplingParams(), stopping)))
        while sock.recv(1 << 18):
            pass


def measure(rows: int) -> HostTime:
    """Steady decode of `rows` rows, block boundaries included."""
    bulk = 1 << 16
    rings = allocate_rings(RingLayout(3, PLAN_WORDS, bulk, rows, 1))
    device = SimulatedDevice(NullProgram(rings, max_rows=rows, token=5), rings)
    limits = SchedulerLimits(CONTEXT, 1000, (1,), 128, 1024, PLAN_WORDS, bulk)
    ledger: Ledger[Release] = Ledger(1, 512)
    pool = BlockPool(rows * (CONTEXT // BLOCK) + 1, BLOCK)
    scheduler = Scheduler(limits, Rows(rows, MAX_STOP_IDS), pool, ledger)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine"
        links = SocketLinks(path, lambda: m.Welcome(m.PROTOCOL_VERSION, "bench", INFO))
        reader = subprocess.Popen([sys.executable, "-m", "benchmarks.host_time", str(path), str(rows)])
        engine = Engine(device, scheduler, links, max_queue=rows)
        while scheduler.counters["generated_tokens"] < 20 * rows:
            engine.turn()
        times = [_turn_us(engine) for _ in range(LAUNCHES)]
        links.close()
        reader.wait(timeout=30)
    return HostTime(rows, statistics.median(times), statistics.quantiles(times, n=10)[-1], GOALS_US[rows])


def _turn_us(engine: Engine) -> float:
    launched, begun = engine.ledger.launched, time.perf_counter()
    engine.turn()
    spent = time.perf_counter() - begun
    if engine.ledger.launched != launched + 1:
        raise RuntimeError("a turn at depth 1 must be one launch")
    return 1e6 * spent


def main() -> None:
    """Print the table."""
    print(f"{'rows':>5} {'median µs':>10} {'p90 µs':>8} {'goal µs':>8}")
    for rows in GOALS_US:
        found = measure(rows)
        print(f"{found.rows:>5} {found.median_us:>10.0f} {found.p90_us:>8.0f} {found.goal_us:>8.0f}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        front_end(sys.argv[1], int(sys.argv[2]))
    else:
        main()
