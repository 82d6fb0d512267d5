"""Services whose counters begin shortly before 2**31 and 2**32 answer, through gRPC, as one does that began at 0."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from benchmarks.local_service import local_service
from tests.parity.client import stats_at_rest
from tests.parity.comparing import compare
from tests.parity.services import BLOCK, CHUNK, ROWS, run_everywhere
from tests.parity.workload import CONTEXT, workload

BEFORE = 6  # launches, handles and calls before a border
STARTS = (0, (1 << 31) - BEFORE, (1 << 32) - BEFORE)
FLAGS = [
    "--context-length", str(CONTEXT), "--block-size", str(BLOCK), "--prefill-chunk", str(CHUNK),
    "--max-prefill-tokens", str(2 * CHUNK), "--max-rows", str(ROWS), "--num-blocks", "29", "--threads", "1",
    "--no-request-log", "--log-interval", "4", "--jitter-seed", "7",
]  # fmt: skip


@pytest.mark.timeout(300)
def test_a_service_across_a_border_of_its_counters_answers_as_one_that_began_at_0(large: bool) -> None:
    """With --large across both borders, else across the last. `tests/runtime/engine/test_long_uptime.py` has both."""
    starts = STARTS if large else (STARTS[0], STARTS[-1])
    with contextlib.ExitStack() as stack:
        services = {
            str(start): stack.enter_context(local_service([*FLAGS, "--counters-from", str(start)])).url
            for start in starts
        }
        asked = workload(0)
        answers = asyncio.run(run_everywhere(services, asked))
        for start in starts[1:]:
            for i, (item, ours, theirs) in enumerate(
                zip(asked, answers["0"], answers[str(start)], strict=True), start=1
            ):
                compare(item, ours, theirs, f"request {i}, counters from {start}")
        for start in starts:
            stats = asyncio.run(stats_at_rest(services[str(start)]))
            assert stats.requests.submitted > 2 * BEFORE, "the handles went across the border"
            assert stats.chain.launches > start + 2 * BEFORE, "and so did the launches"
            assert stats.chain.launches - start == stats.chain.launches_retired
            assert stats.blocks.free + stats.blocks.cached == stats.blocks.total
