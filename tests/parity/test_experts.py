"""A model with experts gives the tokens, log-probabilities and reasons of `serial` at every depth, through the service.

The matrix's eight events, each with a kind of requests; what its witnesses say must have happened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.parity.matrix import EVENTS, saw_depth, saw_kind
from tests.parity.services import depths_of, services_at_every_depth
from tests.parity.test_parity import ATTEMPTS, POOLS, compare_runs, run_cell, table
from tests.parity.upcycled import upcycled

pytestmark = pytest.mark.timeout(0)  # each workload has its own

CELLS: list[tuple[str, str]] = [
    ("seeded-sampling", "staggered-arrival"),
    ("greedy", "end-of-sequence"),
    ("penalties", "block-boundary"),
    ("stop-strings", "abort"),
    ("logprobs", "prefix-hit"),
    ("seeded-sampling", "forced-pause"),
    ("greedy", "forced-eviction"),
    ("logprobs", "forced-eviction"),
    ("prompt-logprobs", "logging-barrier"),
]
Started = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return "--model", str(upcycled(tmp_path_factory.mktemp("upcycled")))


@pytest.fixture(scope="module")
def serial(model: tuple[str, ...]) -> Iterator[str]:
    """In a roomy pool."""
    flags = ["--threads", "1", *model, *POOLS["roomy"]]
    with services_at_every_depth(lambda i: flags, ("serial",)) as urls:
        yield urls["serial"]


@pytest.fixture(scope="module")
def started(model: tuple[str, ...], large: bool) -> Iterator[Started]:
    """URLs by depth, of a pool. Services of another pool end before."""
    with contextlib.ExitStack() as stack:
        running: dict[str, dict[str, str]] = {}

        def of(pool: str) -> dict[str, str]:
            if pool not in running:
                stack.close()
                running.clear()
                flags = ["--threads", "1", *model, *POOLS[pool]]
                depths = depths_of(large=large)
                services = services_at_every_depth(lambda i: [*flags, "--jitter-seed", str(47 + i)], depths)
                running[pool] = stack.enter_context(services)
            return running[pool]

        yield of


def test_every_event_of_the_matrix_is_there() -> None:
    assert {event for _, event in CELLS} == set(EVENTS)


# Cells with the same services stand together: these are started once. What a barrier does with experts it does with
# `test_parity.py`'s model.
CASES = [
    pytest.param(pool, kind, event, marks=[pytest.mark.large] if pool == "barrier" else [])
    for pool, kind, event in sorted((EVENTS[event].pool, kind, event) for kind, event in CELLS)
]


@pytest.mark.parametrize(("pool", "kind", "event"), CASES)
def test_a_cell_of_the_matrix_has_the_answers_of_serial_with_experts(
    pool: str, kind: str, event: str, started: Started, serial: str
) -> None:
    services = {(pool, depth): url for depth, url in started(pool).items()}
    services.setdefault(("roomy", "serial"), serial)
    for attempt in range(ATTEMPTS):
        runs = asyncio.run(run_cell(kind, event, 60 + attempt, services))
        compare_runs(event, runs)
        seen = {
            where: {**EVENTS[event].witness(run), **saw_kind(run), **saw_depth(run)}
            for where, run in runs.items()
            if where[0] == pool
        }
        print(f"\n{kind} / {event}, experts: " + table(list(seen.values())))
        if all(count > 0 for happened in seen.values() for count in happened.values()):
            return
    pytest.fail(f"not everything that the cell is about happened in any of {ATTEMPTS} attempts: {seen}")
