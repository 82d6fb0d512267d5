"""Random workloads with a drafter: every depth has the answers of `serial` without one, in a pool that is too small."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.parity.client import Answer
from tests.parity.comparing import compare
from tests.parity.drafters import OF_RANDOM_WORKLOADS, WITH_WEIGHTS, flags_of
from tests.parity.figures import check_at_rest, grown
from tests.parity.services import figures_everywhere, run_everywhere, services_at_every_depth
from tests.parity.test_parity import POOLS
from tests.parity.workload import workload

pytestmark = pytest.mark.timeout(0)  # each workload has its own

EVERY = 5  # of the seeds: other tests live through the others


def right(answers: list[Answer]) -> int:
    """Drafts that were right, of all requests that said how many."""
    return sum(answer.drafts[1] for answer in answers if answer.drafts is not None)


@pytest.mark.parametrize(
    ("drafter", "drafts"),
    [
        ("ngram", "7"),
        *(
            pytest.param(kind, drafts, marks=[] if OF_RANDOM_WORKLOADS[drafts] == kind else [pytest.mark.large])
            for kind in WITH_WEIGHTS
            for drafts in OF_RANDOM_WORKLOADS
        ),
    ],
)
def test_random_workloads_have_the_answers_of_serial_without_drafts(
    drafter: str, drafts: str, seeds: range, tmp_path: Path
) -> None:
    flags = ["--threads", "1", *POOLS["tight"]]
    drafting = [*flags, *flags_of(drafter, tmp_path), "--draft-tokens", drafts]
    with (
        services_at_every_depth(lambda i: flags, ("serial",)) as alone,
        services_at_every_depth(lambda i: [*drafting, "--jitter-seed", str(61 + i)]) as urls,
    ):
        before = asyncio.run(figures_everywhere(urls))
        found = dict.fromkeys(urls, 0)
        for seed in seeds[::EVERY]:
            asked = workload(seed)
            answers = asyncio.run(run_everywhere({**urls, "without": alone["serial"]}, asked))
            for depth in urls:
                found[depth] += right(answers[depth])
                for item, ours, theirs in zip(asked, answers["without"], answers[depth], strict=True):
                    compare(item, ours, theirs, f"seed {seed}, depth {depth}, request {item.request.request_id}")
        after = asyncio.run(figures_everywhere(urls))
    pressed = 0
    for depth in urls:
        check_at_rest(after[depth], 0)
        since = grown(before[depth], after[depth])
        print(f"\n{drafter}, {drafts} drafts, depth {depth}: {found[depth]} drafts were right, {dict(since)}")
        pressed += since["evicted"] + since["paused"]
        assert found[depth] > 0 or drafts == "auto", "as many as pay may be none"
    assert pressed > 0, "the pool was large enough"
