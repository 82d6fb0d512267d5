"""What broken structures cost: how long a refusal takes, and what a stream beside them feels of it.

The structures are those of `tests/service/broken_structures.py`, each sent once, since what was refused is remembered,
by a process of its own, one after the other. Meanwhile a canary asks for the same completion over and over; before and
afterwards it does so alone.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import grpc

from runahead.v1 import GenerateOnceRequest, GenerateRequest, GenerationServiceStub
from tests.service.broken_structures import BROKEN

ALONE: Final = 4  # completions of the canary before, and afterwards
_REFUSED: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(slots=True)
class Canary:
    """gaps: seconds between tokens, those of one message with an equal part each, the first message of each completion
    left out. said: the completions."""

    gaps: list[float] = field(default_factory=list)
    said: set[tuple[int, ...]] = field(default_factory=set)

    def sing(self, stub: GenerationServiceStub, request: GenerateRequest) -> None:
        """One completion."""
        tokens, before = list[int](), 0.0
        for response in stub.Generate(request):
            if new := [token.id for token in response.delta.tokens]:
                now = time.perf_counter()
                if tokens:
                    self.gaps += [(now - before) / len(new)] * len(new)
                before, tokens = now, tokens + new
        self.said.add(tuple(tokens))

    @property
    def figures(self) -> str:
        p50, p99 = (quantile(self.gaps, share) * 1e3 for share in (0.5, 0.99))
        return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {1 / statistics.mean(self.gaps):.0f} tokens/s"


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def refusals(url: str) -> dict[str, float]:
    """Seconds that each broken structure took to be refused, by its name. Raises ValueError where one is not."""
    found = {}
    with grpc.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        for name, (structure, _) in BROKEN.items():
            request, begun = GenerateOnceRequest(text="def f(", structure=structure), time.perf_counter()
            error = stub.GenerateOnce.future(request).exception()
            found[name] = time.perf_counter() - begun
            if not isinstance(error, grpc.RpcError) or error.code() not in _REFUSED:
                raise ValueError(f"{name} was not refused: {error}")
    return found


def main(url: str, request: GenerateRequest) -> None:
    """Print the lines. request: of the canary."""
    alone, beside = Canary(), Canary()
    spawned = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    with ProcessPoolExecutor(1, spawned) as others, grpc.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        others.submit(time.perf_counter).result()  # it has started, and loaded what it needs
        _sing(alone, stub, request, lambda sung: sung < ALONE)
        asked = others.submit(refusals, url)
        _sing(beside, stub, request, lambda sung: not sung or not asked.done())
        took = asked.result()
        _sing(alone, stub, request, lambda sung: sung < ALONE)
    slowest = max(took, key=lambda name: took[name])
    times = list(took.values())
    print(
        f"{len(took)} broken structures, refused after p50 {quantile(times, 0.5) * 1e3:.1f} ms, "
        f"p99 {quantile(times, 0.99) * 1e3:.0f} ms, at most {took[slowest] * 1e3:.0f} ms ({slowest})"
    )
    same = "the same tokens" if len(alone.said | beside.said) == 1 else "OTHER TOKENS"
    ratio = statistics.median(beside.gaps) / statistics.median(alone.gaps)
    print(f"gaps of a canary alone: {alone.figures}; beside them: {beside.figures}; ratio of p50 {ratio:.2f}; {same}")


def _sing(
    canary: Canary, stub: GenerationServiceStub, request: GenerateRequest, goes_on: Callable[[int], bool]
) -> None:
    """goes_on: asked with how many completions there were."""
    sung = 0
    while goes_on(sung):
        canary.sing(stub, request)
        sung += 1
