"""A service for each depth, alike in everything else, and a workload run on all of them side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from benchmarks.local_service import local_service
from tests.parity.client import Answer, run_workload
from tests.parity.workload import CONTEXT, Asked

DEPTHS = ("serial", "1", "2", "4")
BLOCK = 16
CHUNK = 32
ROWS = 12
WORKLOAD_S = 120.0


@contextlib.contextmanager
def services_at_every_depth(more_flags: Callable[[int], Sequence[str]]) -> Iterator[dict[str, str]]:
    """URLs by depth, gone when the body has ended. more_flags: of the i-th service."""
    flags = ["--context-length", str(CONTEXT), "--block-size", str(BLOCK), "--prefill-chunk", str(CHUNK)]
    flags += ["--max-prefill-tokens", str(2 * CHUNK), "--max-rows", str(ROWS), "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        yield {
            depth: stack.enter_context(local_service([*flags, "--run-ahead", depth, *more_flags(i)])).url
            for i, depth in enumerate(DEPTHS)
        }


async def run_everywhere(services: dict[str, str], asked: list[Asked]) -> dict[str, list[Answer]]:
    """A workload's answers at every depth; the services run side by side. Raises TimeoutError."""
    together = asyncio.gather(*(run_workload(url, asked) for url in services.values()))
    answers = await asyncio.wait_for(together, WORKLOAD_S)
    return dict(zip(services, answers, strict=True))
