"""What is told of drafts: in `Stats`, in snapshots and with the end of a request, each by the place in a run.

Rows with a grammar are held, and evicted, in between. What is told is compared with what the front end has seen: each
message of tokens is what one launch has brought.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import pytest

from runahead.runtime.engine.figures import LogMode, Snapshot
from runahead.runtime.wire import messages as m
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain
from tests.runtime.engine.test_late_masks import DEPTHS, DRAFTS, TIGHT, submit_some
from tests.runtime.late_masks import make_masked_chain

WITH_DRAFTS: Final = {name: drafts for name, drafts in DRAFTS.items() if drafts}


def played(depth: int, interval: int, drafts: dict[str, int]) -> tuple[Chain, list[Snapshot]]:
    """Twelve requests in a pool that is too small for them, whose masks come late."""
    snapshots: list[Snapshot] = []
    options: dict[str, Any] = {**TIGHT, **drafts, "log_interval": interval, "log_mode": LogMode.EVENTS}
    schedule, write = seeded_schedule(1), snapshots.append
    chain, _ = make_masked_chain(depth, 7, schedule=schedule, write_snapshot=write, **options)
    submit_some(chain, 1)
    chain.run()
    assert chain.engine.stats().events["evicted"].count, "nothing was evicted"
    return chain, snapshots


def launches_seen(chain: Chain) -> Counter[int]:
    """Launches that have brought tokens, by the request's handle."""
    seen: Counter[int] = Counter()
    for _, message in chain.links.sent:
        if isinstance(message, m.Output):
            seen.update(set(np.frombuffer(message.handles, np.int64).tolist()))
    return seen


def by_place(counts: list[tuple[int, ...]]) -> list[int]:
    """Their sums. The later places may be missing."""
    most = max(map(len, counts))
    return np.sum([[*each, *[0] * (most - len(each))] for each in counts], axis=0).tolist()


@pytest.mark.parametrize("drafts", WITH_DRAFTS.values(), ids=WITH_DRAFTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_ends_and_figures_say_how_many_drafts_of_each_place_there_were_and_what_a_launch_brought(
    depth: int, drafts: dict[str, int]
) -> None:
    chain, _ = played(depth, 0, drafts)
    stats, seen, tokens = chain.engine.stats(), launches_seen(chain), chain.tokens()
    ends = {handle: end for handle, (end,) in chain.finished().items()}
    assert len(ends) == 12
    for handle, end in ends.items():
        assert end.tokens_per_launch == len(tokens[handle]) / seen[handle]
        assert len(end.drafted) == len(end.accepted)
        assert all(looked_at >= right for looked_at, right in zip(end.drafted, end.accepted, strict=True))
    assert any(end.tokens_per_launch > 1 for end in ends.values()), "no launch brought several tokens"
    for name in ("drafted", "accepted"):
        told, counted = by_place([getattr(end, name) for end in ends.values()]), getattr(stats, name)
        assert told == [counted[place] for place in range(1, 1 + len(told))]
        assert sum(told) == sum(counted.values()) > 0
    assert stats.tokens_per_launch == sum(map(len, tokens.values())) / seen.total() > 1


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("depth", DEPTHS)
def test_snapshots_count_the_drafts_of_every_launch_once(depth: int, interval: int) -> None:
    chain, snapshots = played(depth, interval, DRAFTS["guessed"])
    stats = chain.engine.stats()
    assert len(snapshots) == stats.launches_retired // interval
    for name in ("drafted", "accepted"):
        counted = list(getattr(stats, name).values())
        told = by_place([getattr(snapshot, name) for snapshot in snapshots])
        if interval == 1:
            assert told == counted
        assert 0 < sum(told) <= sum(counted)
    for snapshot in snapshots:
        rows = snapshot.tokens - sum(snapshot.accepted)
        assert snapshot.tokens_per_launch == (snapshot.tokens / rows if rows else 0.0)
