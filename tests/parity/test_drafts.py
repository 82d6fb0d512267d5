"""With drafts every depth gives the tokens, log-probabilities and reasons of `serial` without, through the service.

The cells are those of the matrix, its kinds and its events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.parity.comparing import compare
from tests.parity.drafters import OF_POOLS, WITH_WEIGHTS, flags_of
from tests.parity.figures import check_at_rest, grown
from tests.parity.matrix import EVENTS, Run, workload_of
from tests.parity.services import figures_everywhere, run_everywhere, services_at_every_depth
from tests.parity.test_parity import BARRIER_INTERVAL, POOLS, table

pytestmark = pytest.mark.timeout(0)  # each workload has its own

CELLS = [
    ("greedy", "end-of-sequence"),
    ("greedy", "forced-pause"),
    ("seeded-sampling", "staggered-arrival"),
    ("seeded-sampling", "forced-eviction"),
    ("penalties", "block-boundary"),
    ("penalties", "forced-eviction"),
    ("logprobs", "prefix-hit"),
    ("logprobs", "abort"),
    ("prompt-logprobs", "staggered-arrival"),
    ("stop-strings", "logging-barrier"),
]
# Pools, who drafts, and how much. Cells with the same services stand together: these are started once.
SERVICES = [
    ("roomy", "ngram", "7"),
    ("roomy", "ngram", "auto"),
    ("tight", "ngram", "7"),
    ("barrier", "ngram", "auto"),
    *((pool, kind, drafts) for (pool, drafts), kind in OF_POOLS.items()),
]
# Of every drafter with weights all cells, where they are asked for.
LARGE = [
    (pool, kind, drafts) for kind in WITH_WEIGHTS for pool, drafts in OF_POOLS if (pool, kind, drafts) not in SERVICES
]
PARAMETERS = [
    pytest.param(*services, *cell, marks=[pytest.mark.large] if services in LARGE else [])
    for services in (*SERVICES, *LARGE)
    for cell in CELLS
    if EVENTS[cell[1]].pool == services[0]
]
Started = Callable[[str, str, str], dict[str, str]]


@pytest.fixture(scope="module")
def without() -> Iterator[str]:
    flags = ["--threads", "1", *POOLS["roomy"]]
    with services_at_every_depth(lambda i: flags, ("serial",)) as urls:
        yield urls["serial"]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """URLs by depth, of a pool, a drafter and so many drafts. Services of another pool, or with other drafts, end
    before."""
    folder = tmp_path_factory.mktemp("drafters")
    with contextlib.ExitStack() as stack:
        running: dict[tuple[str, str, str], dict[str, str]] = {}

        def of(pool: str, drafter: str, drafts: str) -> dict[str, str]:
            if (pool, drafter, drafts) not in running:
                stack.close()
                running.clear()
                flags = ["--threads", "1", *POOLS[pool], *flags_of(drafter, folder), "--draft-tokens", drafts]
                services = services_at_every_depth(lambda i: [*flags, "--jitter-seed", str(27 + i)])
                running[pool, drafter, drafts] = stack.enter_context(services)
            return running[pool, drafter, drafts]

        yield of


@pytest.mark.parametrize(("pool", "drafter", "drafts", "kind", "event"), PARAMETERS)
def test_a_cell_of_the_matrix_has_the_answers_of_serial_without_drafts(
    pool: str, drafter: str, drafts: str, kind: str, event: str, started: Started, without: str
) -> None:
    urls = started(pool, drafter, drafts)
    asked = workload_of(kind, event, 50)
    before = asyncio.run(figures_everywhere(urls))
    answers = asyncio.run(run_everywhere({**urls, "without": without}, asked))
    after = asyncio.run(figures_everywhere(urls))
    runs = {d: Run(kind, d, asked, answers[d], grown(before[d], after[d])) for d in urls}
    for depth, run in runs.items():
        check_at_rest(after[depth], BARRIER_INTERVAL[pool])
        for item, ours, theirs in zip(asked, answers["without"], run.answers, strict=True):
            compare(item, ours, theirs, f"{drafter}, {drafts} drafts, depth {depth}, request {item.request.request_id}")
            assert ours.drafts in ((0, 0), None), "without a drafter"
    if (pool, drafts, event) in (("roomy", "7", "end-of-sequence"), ("roomy", "3", "end-of-sequence")):
        told = {depth: [answer.drafts for answer in run.answers] for depth, run in runs.items()}
        places = {depth: [answer.by_place for answer in run.answers] for depth, run in runs.items()}
        assert all(counts == places["serial"] for counts in places.values()), "a race would show here first"
        assert all(counts == told["serial"] for counts in told.values())
        assert all(counts is not None and counts[0] >= counts[1] for counts in told["serial"])
        assert sum(counts[1] for counts in told["serial"] if counts) > 0
        for depth, figures in after.items():
            grew = [
                sum(getattr(figures.tokens, name).values()) - sum(getattr(before[depth].tokens, name).values())
                for name in ("drafted", "accepted")
            ]
            assert grew == [sum(counts[i] for counts in told[depth] if counts) for i in (0, 1)]
            assert grew == [sum(sum(counts[i].values()) for counts in places[depth]) for i in (0, 1)]
    launches = table([{"launches": run.counted["launches"]} for run in runs.values()])
    print(f"\n{kind} / {event}, {drafter}, {drafts} drafts: {launches}")
