"""Where a bound is just met: the smallest pool, blocks that just cover a need, a launch with nothing to sample."""

from __future__ import annotations

from typing import Any

import pytest

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.wire import messages as m
from tests.runtime.chain import make_chain, no_step, tightest_plan
from tests.runtime.pressure import SHORTAGE, events, whole
from tests.runtime.scheduler.played import Played

FOUND = [(7 * i) % 90 + 2 for i in range(100)]


def test_a_pool_may_have_one_block() -> None:
    assert BlockPool(2, 16).allocate(1) == [1]


@pytest.mark.parametrize("depth", [2, 3])
def test_nobody_is_evicted_where_what_is_coming_is_just_what_is_lacking(depth: int) -> None:
    """Requests 1 and 2 lack a block each at SHORTAGE; the only block of 3 is behind the fence then."""
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 7)
    for handle in (1, 2):
        chain.submit(handle, [handle + 2] * 13, max_tokens=20, ignore_eos=True)
    chain.turn_until(lambda: chain.ledger.launched == 3)
    chain.submit(3, [5], max_tokens=8, ignore_eos=True)
    chain.turn_until(lambda: chain.ledger.launched == SHORTAGE - 1)
    assert chain.engine.scheduler.holdings.by_slot[2] is not None, "3 has ended already"
    chain.tell(m.Abort(1, ("r3",)))
    pool, share_out = chain.engine.scheduler.pool, chain.engine.scheduler._ration_blocks
    seen: list[tuple[int, int, int]] = []

    def watched(*needs: Any) -> None:
        seen.append((chain.ledger.launched + 1, pool.available, pool.fenced))
        share_out(*needs)

    chain.engine.scheduler._ration_blocks = watched  # type: ignore[method-assign, assignment]
    chain.turn()
    assert (SHORTAGE, 0, 1) in seen, "what is lacking and what is coming are not one block: this test shows nothing"
    assert len(chain.engine.scheduler.holdings.paused) == 2
    assert chain.engine.scheduler.tally.counters["recomputed_tokens"] == events(chain, "evicted") == 0
    chain.run()
    assert {handle: chain.tokens()[handle] for handle in (1, 2)} == {h: whole([h + 2] * 13, 20) for h in (1, 2)}


def test_a_launch_behind_a_chunk_that_leaves_nothing_has_no_sample_rows() -> None:
    played = Played()
    played.submit(1, 40, 3)
    for _ in range(4):
        played.launch()
    assert [launch.shape.sample_rows for launch in played.ledger.launches()] == [0, 0, 0, 1]


def test_a_launch_tells_the_device_its_rows_and_query_tokens() -> None:
    played = Played()
    played.submit(1, 40, 3)
    played.submit(2, 5, 9)
    for _ in range(4):
        played.launch()
    shapes = [launch.shape for launch in played.ledger.launches()]
    assert [(shape.rows, shape.tokens) for shape in shapes] == [(2, 21), (2, 17), (2, 9), (2, 2)]


def test_a_row_that_decodes_has_a_query_token_for_each_of_its_drafts() -> None:
    played = Played(drafts=3)
    played.submit(1, 5, 30)
    played.submit(2, 9, 30)
    for _ in range(2):
        played.launch()
    assert [launch.shape.tokens for launch in played.ledger.launches()] == [14, 2 * 4]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_cached_prefix_needs_no_place_in_the_plan_that_admits_it(depth: int) -> None:
    """The record names its blocks: a plan that holds one chunk's own has room for a request with a long prefix."""
    chain = make_chain(depth, max_rows=1, plan_words=tightest_plan(1, 16, 8))
    for handle in (1, 2):
        chain.submit(handle, FOUND, max_tokens=3, ignore_eos=True)
        chain.run()
    assert chain.admitted()[2].cached_tokens == 96
    assert chain.tokens()[2] == whole(FOUND, 3)
