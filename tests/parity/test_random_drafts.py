"""Random workloads of drafted, structured and plain rows: every depth has the answers of `serial` without a drafter, in
a pool that is too small.

The models are the bundled one, a MiMo with its head, and the bundled hybrid.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.parity.client import Answer
from tests.parity.comparing import compare
from tests.parity.drafters import OF_HYBRID, OF_RANDOM_WORKLOADS, WITH_WEIGHTS, flags_of, flags_without
from tests.parity.figures import check_at_rest, grown
from tests.parity.services import depths_in, figures_everywhere, run_everywhere, services_at_every_depth
from tests.parity.structures import fits, is_structured, mixed_workload, nothing_was_left
from tests.parity.test_parity import POOLS, table
from tests.parity.workload import Asked

pytestmark = pytest.mark.timeout(0)  # each workload has its own

EVERY = 5  # of the seeds: other tests live through the others
EVERY_OF_HYBRID = 3 * EVERY  # two workloads in every run


def events(asked: list[Asked], answers: list[Answer]) -> Counter[str]:
    """What happened to a workload's requests, as their answers tell. What has ended by itself must fit."""
    counts: Counter[str] = Counter()
    for item, answer in zip(asked, answers, strict=True):
        counts["drafts that were right"] += answer.drafts[1] if answer.drafts else 0
        if not is_structured(item.request):
            counts["plain rows"] += 1
            continue
        counts["structured rows"] += 1
        counts["nothing was left"] += nothing_was_left(item.request, answer.reason)
        counts["ended early"] += answer.reason in ("LENGTH", "CONTEXT_LENGTH", "STOP")
        if answer.reason == "END_OF_SEQUENCE":
            counts["ended by themselves, and fit"] += 1
            assert fits(item.request, answer.text), f"request {item.request.request_id}: {answer.text!r}"
    return counts


@pytest.mark.parametrize(
    ("drafter", "drafts"),
    [
        ("ngram", "7"),
        (OF_HYBRID, "3"),
        *(
            pytest.param(kind, drafts, marks=[] if OF_RANDOM_WORKLOADS[drafts] == kind else [pytest.mark.large])
            for kind in WITH_WEIGHTS
            for drafts in OF_RANDOM_WORKLOADS
        ),
    ],
)
def test_random_workloads_have_the_answers_of_serial_without_drafts(
    drafter: str, drafts: str, seeds: range, large: bool, tmp_path: Path
) -> None:
    flags = ["--threads", "1", *POOLS["tight"]]
    drafting = [*flags, *flags_of(drafter, tmp_path), "--draft-tokens", drafts]
    undrafted = [*flags, *flags_without(drafter, tmp_path)]
    with (
        services_at_every_depth(lambda i: undrafted, ("serial",)) as alone,
        services_at_every_depth(
            lambda i: [*drafting, "--jitter-seed", str(61 + i)], depths_in("tight", large=large)
        ) as urls,
    ):
        before = asyncio.run(figures_everywhere(urls))
        happened: dict[str, Counter[str]] = {depth: Counter() for depth in urls}
        for seed in seeds[:: EVERY_OF_HYBRID if drafter == OF_HYBRID else EVERY]:
            asked = mixed_workload(seed)
            answers = asyncio.run(run_everywhere({**urls, "without": alone["serial"]}, asked))
            assert not any(sum(answer.drafts or ()) for answer in answers["without"]), "without a drafter"
            for depth in urls:
                happened[depth].update(events(asked, answers[depth]))
                for item, ours, theirs in zip(asked, answers["without"], answers[depth], strict=True):
                    compare(item, ours, theirs, f"seed {seed}, depth {depth}, request {item.request.request_id}")
        after = asyncio.run(figures_everywhere(urls))
    for depth, counts in happened.items():
        check_at_rest(after[depth], 0)
        since = grown(before[depth], after[depth])
        counts.update(
            {name: since[name] for name in ("launches", "drafts kept", "paused", "evicted", "overlapped launches")}
        )
        counts["rows held"] = after[depth].tokens.held_rows - before[depth].tokens.held_rows
    print(f"\n{drafter}, {drafts} drafts, depths {' '.join(happened)}: " + table(list(happened.values())))
    for counts in happened.values():
        for name in ("drafts that were right", "nothing was left", "ended early", "ended by themselves, and fit"):
            assert counts[name] > 0, name
    assert sum(counts["paused"] + counts["evicted"] for counts in happened.values()) > 0, "the pool was large enough"
