"""With drafts every depth gives the tokens, log-probabilities and reasons of `serial` without, through the service.

The cells are those of the matrix, its kinds and its events, with structured requests too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.parity.drafted_cells import Cell, Services, check_cell
from tests.parity.drafters import OF_POOLS, UNDRAFTED, WITH_WEIGHTS, flags_of
from tests.parity.matrix import EVENTS
from tests.parity.services import depths_of, services_at_every_depth
from tests.parity.test_parity import POOLS

pytestmark = pytest.mark.timeout(0)  # each workload has its own

CELLS = [
    Cell("greedy", "end-of-sequence"),
    Cell("greedy", "forced-pause"),
    Cell("seeded-sampling", "staggered-arrival"),
    Cell("seeded-sampling", "forced-eviction"),
    Cell("penalties", "block-boundary"),
    Cell("penalties", "forced-eviction"),
    Cell("logprobs", "prefix-hit"),
    Cell("logprobs", "abort"),
    Cell("prompt-logprobs", "staggered-arrival"),
    Cell("stop-strings", "logging-barrier"),
]
# Each event with structured requests of some kind. Those of the first line are in every run, with one drafter each.
STRUCTURED = [
    *(Cell("seeded-sampling", "end-of-sequence", True), Cell("penalties", "forced-eviction", True)),
    Cell("penalties", "staggered-arrival", True),
    Cell("prompt-logprobs", "block-boundary", True),
    Cell("logprobs", "abort", True),
    Cell("greedy", "prefix-hit", True),
    Cell("seeded-sampling", "forced-pause", True),
    Cell("logprobs", "logging-barrier", True),
]
PRODUCT = [Cell(kind, event) for kind in ("greedy", "seeded-sampling", "penalties", "logprobs") for event in EVENTS]
# Pools, who drafts, and how much. Cells with the same services stand together: these are started once.
SERVICES = [
    ("roomy", "ngram", "7"),
    ("tight", "ngram", "7"),
    *((pool, kind, drafts) for (pool, drafts), kind in OF_POOLS.items()),
]
# Of every drafter with weights all cells, where they are asked for.
LARGE = [
    ("roomy", "ngram", "auto"),
    ("barrier", "ngram", "auto"),
    *(
        (pool, kind, drafts)
        for kind in WITH_WEIGHTS
        for pool, drafts in OF_POOLS
        if (pool, kind, drafts) not in SERVICES
    ),
]
# Of each kind of drafter one has every kind of requests with every event.
WHOLE = ("ngram", "eagle-1", "mtp", "model")
WITH_STRUCTURES = {("roomy", "ngram", "7"): STRUCTURED[:1], ("tight", "model", "3"): STRUCTURED[1:2]}


def cells_of(pool: str, drafter: str, drafts: str) -> Iterator[tuple[Cell, bool]]:
    """The cells that these services have, each with whether they have it in every run."""
    services = (pool, drafter, drafts)
    always = [*CELLS, *WITH_STRUCTURES.get(services, [])] if services in SERVICES else []
    more = [*PRODUCT, *STRUCTURED] if drafter in WHOLE and services != ("roomy", "ngram", "auto") else []
    for cell in dict.fromkeys([*always, *CELLS, *more]):
        if EVENTS[cell.event].pool == pool:
            yield cell, cell in always


PARAMETERS = [
    pytest.param(*services, cell, marks=[] if always else [pytest.mark.large], id="-".join((*services, str(cell))))
    for services in (*SERVICES, *LARGE)
    for cell, always in cells_of(*services)
]
Started = Callable[[str, str, str], Services]


@pytest.fixture(scope="module")
def without() -> Iterator[str]:
    flags = ["--threads", "1", *POOLS["roomy"], UNDRAFTED]
    with services_at_every_depth(lambda i: flags, ("serial",)) as urls:
        yield urls["serial"]


@pytest.fixture(scope="module")
def started(without: str, large: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Services of a pool, with a drafter and so many drafts. Those of others end before."""
    folder = tmp_path_factory.mktemp("drafters")
    with contextlib.ExitStack() as stack:
        running: dict[tuple[str, str, str], Services] = {}

        def of(pool: str, drafter: str, drafts: str) -> Services:
            if (pool, drafter, drafts) not in running:
                stack.close()
                running.clear()
                flags = ["--threads", "1", *POOLS[pool], *flags_of(drafter, folder), "--draft-tokens", drafts]
                depths = depths_of(large=large)
                urls = services_at_every_depth(lambda i: [*flags, "--jitter-seed", str(27 + i)], depths)
                running[pool, drafter, drafts] = Services(pool, drafter, drafts, stack.enter_context(urls), without)
            return running[pool, drafter, drafts]

        yield of


def test_every_kind_of_drafter_has_every_kind_of_requests_with_every_event() -> None:
    for drafter in WHOLE:
        found = {cell for services in (*SERVICES, *LARGE) if services[1] == drafter for cell, _ in cells_of(*services)}
        assert found >= set(PRODUCT)
        assert {cell.event for cell in found if cell.is_structured} == set(EVENTS)


@pytest.mark.parametrize(("pool", "drafter", "drafts", "cell"), PARAMETERS)
def test_a_cell_of_the_matrix_has_the_answers_of_serial_without_drafts(
    pool: str, drafter: str, drafts: str, cell: Cell, started: Started
) -> None:
    check_cell(cell, started(pool, drafter, drafts))
