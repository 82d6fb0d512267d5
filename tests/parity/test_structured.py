"""Structured requests without a drafter have the answers of `serial` at every depth, whatever befalls them: what their
structures force is drafted alone. `make parity` adds these cells of the matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.parity.drafted_cells import Cell, Services, check_cell
from tests.parity.drafters import UNDRAFTED
from tests.parity.matrix import EVENTS
from tests.parity.services import services_at_every_depth
from tests.parity.test_drafts import STRUCTURED
from tests.parity.test_parity import POOLS

pytestmark = [pytest.mark.timeout(0), pytest.mark.large]  # each workload has its own time

BY_POOL: list[Cell] = sorted(STRUCTURED, key=lambda cell: EVENTS[cell.event].pool)
Started = Callable[[str], Services]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """Services of a pool. Those of another pool end before."""
    with contextlib.ExitStack() as always, contextlib.ExitStack() as stack:
        flags = ["--threads", "1"]
        undrafted = services_at_every_depth(lambda i: [*flags, *POOLS["roomy"], UNDRAFTED], ("serial",))
        without = always.enter_context(undrafted)["serial"]
        running: dict[str, Services] = {}

        def of(pool: str) -> Services:
            if pool not in running:
                stack.close()
                running.clear()
                urls = services_at_every_depth(lambda i: [*flags, *POOLS[pool], "--jitter-seed", str(47 + i)])
                running[pool] = Services(pool, "forced alone", "7", stack.enter_context(urls), without)
            return running[pool]

        yield of


@pytest.mark.parametrize("cell", BY_POOL, ids=str)
def test_a_cell_of_structured_requests_has_the_answers_of_serial(cell: Cell, started: Started) -> None:
    check_cell(cell, started(EVENTS[cell.event].pool))
