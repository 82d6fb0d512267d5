"""What front ends can carry: messages and tokens a second through gRPC, behind an engine that computes nothing.

The engine of this benchmark speaks the real protocol over the real socket. It sends each stream a token a launch, and
a launch either at the pace of a real one or as soon as the front ends have read the one before. The client reads bytes
and looks at them afterwards: every token of every stream must be there, and every stream must have ended. It and the
engine run on the same machine, so that where cores are few they take a part of them; the front ends' own processor
time is counted apart, and says what a core could carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.null_engine import NullEngine
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes.front_end_process import FrontEndOrders, FrontEndProcess
from runahead.service.processes.port import Port
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board

CHANNELS: Final = 8
STREAMS: Final = 256
PACE_S: Final = 0.011  # of an 8B model's step at so many streams, on one H200
LAUNCHES: Final = 700
ROUNDS: Final = 3
CEILING: Final = 30_000  # messages a second and core of grpc.aio's server, with a handler that only writes
HERE: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Carried:
    """What one run brought. cpu_s: of all front ends. seconds: from the first launch to the last end."""

    seconds: float
    tokens: int
    messages: int
    cpu_s: float


@contextlib.asynccontextmanager
async def front_ends(count: int, folder: Path, **chosen: Any) -> AsyncIterator[tuple[NullEngine, list[int], int]]:
    """The engine, the front ends' process ids and their port. chosen: settings of theirs."""
    settings = FrontEndSettings(frontends=count, log_level="error", **chosen)
    memory = os.memfd_create("board")
    os.truncate(memory, Board.size(count + 1))  # a line each, and the side server's
    port = Port.reserve(settings.host, 0, shared=count > 1, spelling=str)
    engine = NullEngine(folder / "engine.sock")
    running: list[FrontEndProcess] = []
    try:
        number = port.number
        for index in range(count):
            orders = FrontEndOrders(
                engine=EngineConfig(model=str(BUNDLED_FOLDER), device="cpu"),
                settings=settings,
                index=index,
                board=memory,
                linger_s=0.0,
                version="0",
            )
            running.append(await FrontEndProcess.start(orders))
            number = await running[-1].serve(folder / "engine.sock", number)
        yield engine, [front_end.pid for front_end in running], number
    finally:
        for front_end in running:
            await front_end.kill()
        port.close()
        engine.close()
        os.close(memory)


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(count: int, pace_s: float) -> Carried:
    """One run. pace_s: from launch to launch; 0 is as fast as they are read."""
    with tempfile.TemporaryDirectory() as name:
        async with front_ends(count, Path(name)) as (engine, processes, port):
            client = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "benchmarks.front_ends_client",
                *map(str, (port, CHANNELS, STREAMS, LAUNCHES, count)),
                stdout=asyncio.subprocess.PIPE,
            )
            assert client.stdout is not None
            if await client.stdout.readline() != b"ready\n":
                raise RuntimeError("the benchmark's client could not open its streams; it has said why")
            before, begun = sum(map(_cpu_s, processes)), time.monotonic()
            await asyncio.to_thread(engine.run, LAUNCHES, pace_s)
            found = json.loads(await client.stdout.readline())
            after = sum(map(_cpu_s, processes))
            await client.wait()
    return Carried(found["ended"] - begun, found["tokens"], found["messages"], after - before)


def main(beside: Path | None = None) -> None:
    """Print the table, of this checkout alone or of two, measured alternately."""
    checkouts = [HERE] if beside is None else [beside.resolve(), HERE]
    if beside is not None:
        print(f"before: {checkouts[0]}; after: {HERE}; medians of {ROUNDS} alternating rounds")
    print(f"{STREAMS} streams over {CHANNELS} connections, {LAUNCHES} launches, a token a stream and launch")
    print(f"a core of a front end beside the ceiling of gRPC's own server in Python: {CEILING:,} messages/s")
    print(
        f"{'':7} {'front ends':>10} {'launches':>9} {'tokens/s':>9} {'messages/s':>10} {'tokens a message':>16} "
        f"{'CPU µs a message':>16} {'CPU µs a token':>14} {'cores':>5} {'messages/s a core':>17}"
    )
    for count in (1, 2):
        for pace_s in (PACE_S, 0.0):
            runs: dict[Path, list[Carried]] = {checkout: [] for checkout in checkouts}
            for round_ in range(ROUNDS):
                for checkout in checkouts if round_ % 2 == 0 else reversed(checkouts):
                    runs[checkout].append(_measured(checkout, count, pace_s))
            for checkout, found in runs.items():
                _print("" if beside is None else "after" if checkout == HERE else "before", count, pace_s, found)


def _print(label: str, count: int, pace_s: float, runs: list[Carried]) -> None:
    def middle(value: Any) -> float:
        return statistics.median(map(value, runs))

    pace = f"{1e3 * pace_s:.0f} ms" if pace_s else "unpaced"
    print(
        f"{label:7} {count:>10} {pace:>9} {middle(lambda run: run.tokens / run.seconds):>9.0f} "
        f"{middle(lambda run: run.messages / run.seconds):>10.0f} "
        f"{middle(lambda run: run.tokens / run.messages):>16.1f} "
        f"{middle(lambda run: 1e6 * run.cpu_s / run.messages):>16.1f} "
        f"{middle(lambda run: 1e6 * run.cpu_s / run.tokens):>14.2f} "
        f"{middle(lambda run: run.cpu_s / run.seconds):>5.2f} "
        f"{middle(lambda run: run.messages / run.cpu_s):>17.0f}",
        flush=True,
    )


def _measured(checkout: Path, count: int, pace_s: float) -> Carried:
    """By a process whose front ends are those of `checkout`; engine and client are this one's."""
    from benchmarks.checkouts import environment_of

    environment: Mapping[str, str] = environment_of(checkout)
    paths = f"{checkout / 'src'}{os.pathsep}{HERE}{os.pathsep}{checkout}"
    command = [sys.executable, "-P", "-m", "benchmarks.front_ends", str(count), str(pace_s)]
    run = subprocess.run(
        command, cwd=checkout, env={**environment, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    )
    if run.returncode:
        sys.exit(f"{checkout} could not be measured; what its process said is above")
    return Carried(**json.loads(run.stdout))


if __name__ == "__main__":
    carried = asyncio.run(measure(int(sys.argv[1]), float(sys.argv[2])))
    print(json.dumps({name: getattr(carried, name) for name in Carried.__slots__}))
