"""A service for each depth, alike in everything else, and a workload run on all of them side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from benchmarks.local_service import local_service
from runahead.v1 import ServerStats
from tests.parity.client import Answer, run_workload, stats_at_rest
from tests.parity.workload import CONTEXT, Asked

DEPTHS = ("serial", "1", "2", "4")
BLOCK = 16
CHUNK = 32
ROWS = 12
WORKLOAD_S = 240.0  # six services may run it side by side, beside other tests
_STARTING = 2  # at once


def depths_of(*, large: bool) -> tuple[str, ...]:
    """Depths of services: `make parity` (large) has every depth, every run serial and the deepest chain, and beside
    them the default depth in the roomy pool of `test_parity.py`. A third of a cell's time is its services' start."""
    return DEPTHS if large else ("serial", "4")


@contextlib.contextmanager
def services_at_every_depth(
    more_flags: Callable[[int], Sequence[str]], depths: Sequence[str] = DEPTHS
) -> Iterator[dict[str, str]]:
    """URLs by depth, gone when the body has ended. more_flags: of the i-th service."""
    flags = ["--context-length", str(CONTEXT), "--block-size", str(BLOCK), "--prefill-chunk", str(CHUNK)]
    flags += ["--max-prefill-tokens", str(2 * CHUNK), "--max-rows", str(ROWS), "--no-request-log"]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(_STARTING) as starting:
            started = {
                depth: starting.submit(_start, [*flags, "--run-ahead", depth, *more_flags(i)])
                for i, depth in enumerate(depths)
            }
            for service in started.values():
                stack.callback(_end, service)
        yield {depth: service.result()[0] for depth, service in started.items()}


def _start(flags: Sequence[str]) -> tuple[str, contextlib.ExitStack]:
    stack = contextlib.ExitStack()
    return stack.enter_context(local_service(flags)).url, stack


def _end(service: Future[tuple[str, contextlib.ExitStack]]) -> None:
    if service.exception() is None:
        service.result()[1].close()


Where = TypeVar("Where")  # a depth, or a pool and a depth


async def run_everywhere(services: Mapping[Where, str], asked: list[Asked]) -> dict[Where, list[Answer]]:
    """A workload's answers by service; the services run side by side. Raises TimeoutError."""
    together = asyncio.gather(*(run_workload(url, asked) for url in services.values()))
    answers = await asyncio.wait_for(together, WORKLOAD_S)
    return dict(zip(services, answers, strict=True))


async def figures_everywhere(services: Mapping[Where, str]) -> dict[Where, ServerStats]:
    """The figures of each service once nothing is in flight."""
    figures = await asyncio.gather(*(stats_at_rest(url) for url in services.values()))
    return dict(zip(services, figures, strict=True))
