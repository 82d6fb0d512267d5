"""Time to first token at every depth while other streams run, measured at the client."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.local_service import local_service
from benchmarks.throughput import overlap_ratio, prompts
from runahead.v1 import GenerateRequest, GenerationServiceStub

DEPTHS = ("serial", "1", "2", "3", "4")
BACKGROUND = 7
PROBES = 100


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds to the first token of a request that arrives while others decode."""

    depth: str
    p50_ms: float
    p99_ms: float
    overlap_ratio: float


def _request(prompt: str, max_tokens: int) -> GenerateRequest:
    request = GenerateRequest(text=prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    return request


async def _keep_busy(stub: GenerationServiceStub, prompt: str) -> None:
    while True:
        async for _ in stub.Generate(_request(prompt, 400)):
            pass


async def _first_token_ms(stub: GenerationServiceStub, prompt: str) -> float:
    begun = time.perf_counter()
    found = 0.0
    async for response in stub.Generate(_request(prompt, 2)):
        if response.WhichOneof("event") == "delta" and not found:
            found = 1e3 * (time.perf_counter() - begun)
    return found


async def _probe(url: str) -> list[float]:
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        busy = [asyncio.create_task(_keep_busy(stub, prompt)) for prompt in prompts(BACKGROUND)]
        try:
            for prompt in prompts(5):
                await _first_token_ms(stub, prompt)
            return [await _first_token_ms(stub, prompt) for prompt in prompts(PROBES)]
        finally:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)


def measure(folder: Path, depth: str) -> FirstToken:
    """One service at one depth."""
    with local_service(["--model", str(folder), "--run-ahead", depth, "--no-prefix-cache"]) as service:
        times = asyncio.run(_probe(service.url))
        ratio = asyncio.run(overlap_ratio(service.url))
    p99 = statistics.quantiles(times, n=100, method="inclusive")[-1]
    return FirstToken(depth, statistics.median(times), p99, ratio)


def main(folder: Path) -> None:
    """Print the table."""
    print(f"{'depth':>8} {'p50 ms':>8} {'p99 ms':>8} {'overlap ratio':>14}")
    for depth in DEPTHS:
        found = measure(folder, depth)
        print(f"{found.depth:>8} {found.p50_ms:>8.1f} {found.p99_ms:>8.1f} {found.overlap_ratio:>14.3f}")
