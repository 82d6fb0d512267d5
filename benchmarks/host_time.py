"""The engine's host time a launch on the null device: take, plan, stage, launch, commit, publish, and nothing else.

The device computes nothing and is done at once, so every microsecond of a turn is the host's. At depth 1 a turn of the
loop is one launch. The front end is a separate process on the engine's real socket: it reads and drops everything.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import structlog

from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.engine.loop import Engine
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import MAX_STOP_IDS, SamplingParams, StoppingParams
from tests.cuda_graphs.simulated_device import SimulatedDevice
from tests.runtime.programs.hash_program import NullProgram

GOALS_US = {1: 100, 8: 120, 64: 150, 256: 200}
LAUNCHES = 3000
LOG_INTERVAL = 100
CONTEXT = 8192
BLOCK = 16
INFO = m.EngineInfo("null", "none", 1000, CONTEXT, (1,), -1, 256, 256, 2, BLOCK, 1, "null", "none", 0)


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds a launch."""

    median_us: float
    mean_us: float
    p90_us: float


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


def _refuse(owner: int, why: str) -> None:
    raise RuntimeError(f"the engine refused the benchmark's front end: {why}")


def measure(rows: int, lifecycle: bool) -> HostTime:
    """Steady decode of `rows` rows, block boundaries included.

    lifecycle: with the prefix cache and a logged snapshot every LOG_INTERVAL launches.
    """
    bulk = 1 << 16
    rings = allocate_rings(RingLayout(3, PLAN_WORDS, bulk, rows, 1))
    device = SimulatedDevice(NullProgram(rings, max_rows=rows, token=5), rings)
    limits = SchedulerLimits(CONTEXT, 1000, (1,), 128, 1024, PLAN_WORDS, bulk, prefix_cache=lifecycle)
    ledger: Ledger[Deferred] = Ledger(1, 512)
    pool = BlockPool(rows * (CONTEXT // BLOCK) + 1, BLOCK)
    scheduler = Scheduler(limits, Rows(rows, MAX_STOP_IDS, CONTEXT), pool, ledger)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine"
        links = SocketLinks(path, m.Welcome(m.PROTOCOL_VERSION, "bench", INFO), _refuse)
        reader = subprocess.Popen([sys.executable, "-m", "benchmarks.host_time", str(path), str(rows)])
        with Path(os.devnull).open("w") as nowhere:
            log = structlog.wrap_logger(structlog.WriteLogger(nowhere), [structlog.processors.JSONRenderer()])
            engine = Engine(
                device,
                scheduler,
                links,
                max_queue=rows,
                log_interval=LOG_INTERVAL if lifecycle else 0,
                write_snapshot=lambda snapshot: log.info("snapshot", **asdict(snapshot)),
            )
            times = _steady(engine, rows)
        links.close()
        reader.wait(timeout=30)
    return HostTime(statistics.median(times), statistics.fmean(times), statistics.quantiles(times, n=10)[-1])


def _steady(engine: Engine, rows: int) -> list[float]:
    """Microseconds of LAUNCHES turns, once every row decodes."""
    while engine.scheduler.tally.counters["generated_tokens"] < 20 * rows:
        engine.turn()
    return [_turn_us(engine) for _ in range(LAUNCHES)]


def _turn_us(engine: Engine) -> float:
    launched, begun = engine.ledger.launched, time.perf_counter()
    engine.turn()
    spent = time.perf_counter() - begun
    if engine.ledger.launched != launched + 1:
        raise RuntimeError("a turn at depth 1 must be one launch")
    return 1e6 * spent


def main() -> None:
    """Print the table."""
    print("with the prefix cache and logged snapshots; in brackets without either")
    print(f"{'rows':>5} {'median µs':>18} {'mean µs':>18} {'p90 µs':>18} {'goal µs':>8}")
    for rows, goal_us in GOALS_US.items():
        off, on = measure(rows, False), measure(rows, True)
        pairs = ((on.median_us, off.median_us), (on.mean_us, off.mean_us), (on.p90_us, off.p90_us))
        columns = " ".join(f"{f'{with_all:.0f} ({without:.0f})':>18}" for with_all, without in pairs)
        print(f"{rows:>5} {columns} {goal_us:>8.0f}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        front_end(sys.argv[1], int(sys.argv[2]))
    else:
        main()
