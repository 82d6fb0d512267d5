"""Tensor-parallel ranks through the service: every depth gives the answers of `serial` with as many ranks.

Each rank is a process, delayed by its own seed, and poisons blocks that are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

import pytest

from tests.parity.matrix import EVENTS, saw_depth
from tests.parity.services import DEPTHS, services_at_every_depth
from tests.parity.test_parity import ATTEMPTS, POOLS, compare_runs, run_cell, table

pytestmark = pytest.mark.timeout(0)  # each workload has its own

KIND = "seeded-sampling"
FEW = {"prefix-hit": ("serial", "4"), "forced-eviction": ("4",)}  # events without --large, and depths of their pools
LARGE = {2: DEPTHS, 4: ("serial", "4")}  # depths of every event with --large, by number of ranks


def _flags(ranks: int, pool: str, service: int) -> list[str]:
    return ["--tensor-parallel", str(ranks), "--threads", "1", "--jitter-seed", str(61 + service), *POOLS[pool]]


@pytest.fixture(scope="module", params=LARGE)
def services(large: bool, request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], str]]:
    """URLs by pool and depth."""
    ranks: int = request.param
    if ranks > 2 and not large:
        pytest.skip("many processes: make parity runs them")
    depths = {EVENTS[event].pool: LARGE[ranks] if large else few for event, few in FEW.items()}
    if large:
        depths = {event.pool: LARGE[ranks] for event in EVENTS.values()}
    with contextlib.ExitStack() as stack:
        found: dict[tuple[str, str], str] = {}
        for pool, some in depths.items():
            running = stack.enter_context(services_at_every_depth(partial(_flags, ranks, pool), some))
            found |= {(pool, depth): url for depth, url in running.items()}
        yield found


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_of_the_matrix_has_the_answers_of_serial_with_as_many_ranks(
    event: str, services: dict[tuple[str, str], str], large: bool
) -> None:
    if not large and event not in FEW:
        pytest.skip("many services: make parity runs them")
    pool = EVENTS[event].pool
    mine = {where: url for where, url in services.items() if where[0] == pool or where == ("roomy", "serial")}
    for attempt in range(ATTEMPTS):
        runs = asyncio.run(run_cell(KIND, event, 70 + attempt, mine))
        compare_runs(event, runs)
        seen = [{**EVENTS[event].witness(run), **saw_depth(run)} for where, run in runs.items() if where[0] == pool]
        print(f"\n{KIND} / {event}, ranks: " + table(seen))
        if all(count > 0 for happened in seen for count in happened.values()):
            return
    pytest.fail(f"not everything that the cell is about happened in any of {ATTEMPTS} attempts: {seen}")
