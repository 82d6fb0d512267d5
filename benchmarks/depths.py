"""What running ahead brings: tokens a second through gRPC at every depth, in one run, beside `serial`."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.local_service import local_service
from benchmarks.throughput import through_grpc
from runahead.v1 import GenerationServiceStub, StatsRequest

DEPTHS = ("serial", "1", "2", "4")
STREAMS = (1, 8, 64)
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Depth:
    """One service. tokens_per_s: by number of streams, median. The rest is the service's own, over its life."""

    depth: str
    tokens_per_s: tuple[float, ...]
    overlap_ratio: float
    idle_us: float  # the device's wait between two launches
    host_us: float  # the engine's own time a launch


async def _chain(url: str) -> tuple[float, float, float]:
    async with grpc.aio.insecure_channel(url) as channel:
        chain = (await GenerationServiceStub(channel).Stats(StatsRequest())).stats.chain
        launches = max(1, chain.launches_retired)
        return chain.overlap_ratio, 1e6 * chain.device_idle_s / launches, 1e6 * chain.host_s / launches


def measure(folder: Path, device: str, depth: str, max_tokens: int) -> Depth:
    """One service at one depth."""
    flags = ["--model", str(folder), "--device", device, "--run-ahead", depth]
    with local_service(flags) as service:
        asyncio.run(through_grpc(service.url, 8, 16))
        speeds = [
            statistics.median(asyncio.run(through_grpc(service.url, streams, max_tokens)) for _ in range(ROUNDS))
            for streams in STREAMS
        ]
        overlap, idle, host = asyncio.run(_chain(service.url))
    return Depth(depth, tuple(speeds), overlap, idle, host)


def table(found: Sequence[Depth]) -> list[str]:
    """Lines to print: speed and, in brackets, the ratio to the first row."""
    head = f"{'depth':>8}" + "".join(f"{f'{streams} streams, tokens/s':>24}" for streams in STREAMS)
    lines = [head + f"{'overlap':>9}{'idle µs':>9}{'host µs':>9}"]
    for row in found:
        cells = (
            f"{now:.0f} ({now / base:.2f})" for now, base in zip(row.tokens_per_s, found[0].tokens_per_s, strict=True)
        )
        lines.append(
            f"{row.depth:>8}" + "".join(f"{cell:>24}" for cell in cells) + f"{row.overlap_ratio:>9.3f}"
            f"{row.idle_us:>9.1f}{row.host_us:>9.0f}"
        )
    return lines


def main(folder: Path, device: str) -> None:
    """Print the table."""
    max_tokens = 512 if device == "cuda" else 64
    print("\n".join(table([measure(folder, device, depth, max_tokens) for depth in DEPTHS])))
