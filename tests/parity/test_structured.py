"""Structured requests have the answers of `serial` at every depth, in cells of the matrix that `make parity` adds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.parity.matrix import EVENTS
from tests.parity.services import DEPTHS, services_at_every_depth
from tests.parity.structured_cells import check_cell
from tests.parity.test_parity import BARRIER_INTERVAL, POOLS

pytestmark = [pytest.mark.timeout(0), pytest.mark.large]  # each workload has its own time

CELLS: Final = [
    ("seeded-sampling", "end-of-sequence"),
    ("logprobs", "abort"),
    ("greedy", "prefix-hit"),
    ("penalties", "staggered-arrival"),
    ("prompt-logprobs", "block-boundary"),
    ("seeded-sampling", "forced-pause"),
    ("penalties", "forced-eviction"),
    ("logprobs", "logging-barrier"),
    ("greedy", "logging-barrier"),
]
Started = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """URLs by depth, of a pool. Services of another pool end before."""
    with contextlib.ExitStack() as stack:
        running: dict[str, dict[str, str]] = {}

        def of(pool: str) -> dict[str, str]:
            if pool not in running:
                stack.close()
                running.clear()
                flags = ["--threads", "1", *POOLS[pool]]
                services = services_at_every_depth(lambda i: [*flags, "--jitter-seed", str(47 + i)])
                running[pool] = stack.enter_context(services)
            return running[pool]

        yield of


@pytest.mark.parametrize(("kind", "event"), CELLS)
def test_a_cell_of_structured_requests_has_the_answers_of_serial(kind: str, event: str, started: Started) -> None:
    pool = EVENTS[event].pool
    urls = started(pool)
    assert tuple(urls) == DEPTHS
    check_cell(kind, event, urls, BARRIER_INTERVAL[pool])
