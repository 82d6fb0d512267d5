"""Random workloads of drafted, structured and plain rows: every depth has the answers of `serial` without a drafter, in
a pool that is too small.

The models are the bundled one, a MiMo with its head, and the bundled hybrid.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parity.client import Answer
from tests.parity.comparing import compare
from tests.parity.drafters import OF_HYBRID, OF_RANDOM_WORKLOADS, WITH_WEIGHTS, flags_of, flags_without
from tests.parity.figures import check_at_rest, grown
from tests.parity.services import depths_of, figures_everywhere, run_everywhere, services_at_every_depth
from tests.parity.structures import fits, is_structured, mixed_workload, nothing_was_left
from tests.parity.test_parity import POOLS, table
from tests.parity.workload import Asked

pytestmark = pytest.mark.timeout(0)  # each workload has its own

EVERY = 5  # of the seeds: other tests live through the others
EVERY_OF_HYBRID = 7  # two workloads in every run


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


@pytest.fixture(scope="module")
def undrafted() -> Iterator[Callable[[list[str], int], list[Answer]]]:
    """Answers in serial by a service's flags and a workload's seed. A service with other flags ends before."""
    with contextlib.ExitStack() as stack:
        started: dict[tuple[str, ...], dict[str, str]] = {}
        known: dict[int, list[Answer]] = {}

        def answers(flags: list[str], seed: int) -> list[Answer]:
            if tuple(flags) not in started:
                stack.close()
                started.clear()
                known.clear()
                services = services_at_every_depth(lambda i: flags, ("serial",))
                started[tuple(flags)] = stack.enter_context(services)
            if seed not in known:
                urls = started[tuple(flags)]
                known[seed] = asyncio.run(run_everywhere(urls, mixed_workload(seed)))["serial"]
            return known[seed]

        yield answers


# Drafters of one model stand together: they are compared with the same answers.
@pytest.mark.parametrize(
    ("drafter", "drafts"),
    [
        ("ngram", "7"),
        *(
            pytest.param(kind, drafts, marks=[] if OF_RANDOM_WORKLOADS[drafts] == kind else [pytest.mark.large])
            for kind in WITH_WEIGHTS
            for drafts in OF_RANDOM_WORKLOADS
        ),
        (OF_HYBRID, "3"),
    ],
)
def test_random_workloads_have_the_answers_of_serial_without_drafts(
    drafter: str, drafts: str, undrafted: Callable[[list[str], int], list[Answer]], seeds: range, large: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    flags = ["--threads", "1", *POOLS["tight"]]
    drafting = [*flags, *flags_of(drafter, tmp_path), "--draft-tokens", drafts]
    without = [*flags, *flags_without(drafter, tmp_path)]
    with services_at_every_depth(lambda i: [*drafting, "--jitter-seed", str(61 + i)], depths_of(large=large)) as urls:
        before = asyncio.run(figures_everywhere(urls))
        happened: dict[str, Counter[str]] = {depth: Counter() for depth in urls}
        for seed in seeds[:: EVERY_OF_HYBRID if drafter == OF_HYBRID else EVERY]:
            asked = mixed_workload(seed)
            answers, expected = asyncio.run(run_everywhere(urls, asked)), undrafted(without, seed)
            assert not any(sum(answer.drafts or ()) for answer in expected), "without a drafter"
            for depth in urls:
                happened[depth].update(events(asked, answers[depth]))
                for item, ours, theirs in zip(asked, expected, answers[depth], strict=True):
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
