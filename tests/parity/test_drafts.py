"""With drafts every depth gives the tokens, log-probabilities and reasons of `serial` without, through the service.

The cells are those of the matrix, its kinds and its events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.parity.comparing import compare
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
DRAFTED = ("7", "auto")


@pytest.fixture(scope="module")
def without() -> Iterator[str]:
    flags = ["--threads", "1", *POOLS["roomy"]]
    with services_at_every_depth(lambda i: flags, ("serial",)) as urls:
        yield urls["serial"]


@pytest.fixture(scope="module")
def drafting(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, dict[str, str]]]:
    """A pool, how much is drafted, and URLs by depth."""
    pool, drafts = request.param
    flags = ["--threads", "1", *POOLS[pool], "--drafter", "ngram", "--draft-tokens", drafts]
    with services_at_every_depth(lambda i: [*flags, "--jitter-seed", str(27 + i)]) as urls:
        yield pool, drafts, urls


@pytest.mark.parametrize(
    ("drafting", "kind", "event"),
    [((EVENTS[event].pool, drafts), kind, event) for drafts in DRAFTED for kind, event in CELLS],
    indirect=["drafting"],
)
def test_a_cell_of_the_matrix_has_the_answers_of_serial_without_drafts(
    kind: str, event: str, drafting: tuple[str, str, dict[str, str]], without: str
) -> None:
    pool, drafts, urls = drafting
    asked = workload_of(kind, event, 50)
    before = asyncio.run(figures_everywhere(urls))
    answers = asyncio.run(run_everywhere({**urls, "without": without}, asked))
    after = asyncio.run(figures_everywhere(urls))
    runs = {d: Run(kind, d, asked, answers[d], grown(before[d], after[d])) for d in urls}
    for depth, run in runs.items():
        check_at_rest(after[depth], BARRIER_INTERVAL[pool])
        for item, ours, theirs in zip(asked, answers["without"], run.answers, strict=True):
            compare(item, ours, theirs, f"{drafts} drafts, depth {depth}, request {item.request.request_id}")
    launches = table([{"launches": run.counted["launches"]} for run in runs.values()])
    print(f"\n{kind} / {event}, {drafts} drafts: {launches}")
