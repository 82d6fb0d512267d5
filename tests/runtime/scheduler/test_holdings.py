"""Which blocks of a row can be found, and how many tokens of an evicted request count as computed."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.memory.block_column import int32_array
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import Hit
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred, Eviction
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams

SIZE = 4


def holding(tokens: int, *, has_state: bool) -> tuple[Holdings, Request]:
    """A row of so many tokens, all of which launch 1 has computed."""
    limits = SchedulerLimits(
        64, 97, (1,), 16, 32, 4096, 4096, has_state=has_state, snapshots=4 * has_state, snapshot_tokens=SIZE * 16
    )  # fmt: skip
    rows, pool, ledger = Rows(1, 4, 64), BlockPool(20, SIZE), Ledger[Deferred](1, 512, 1)
    holdings = Holdings(limits, rows, pool, ledger)
    prompt = np.arange(tokens, dtype=np.int32) + 3
    request = Request(1, 1, "r1", prompt, SamplingParams(), StoppingParams(9), tokens + 9, may_hold=True)
    holdings.callers.enter(request.caller)
    holdings.allocate_row(request, Hit(int32_array([]), 0))
    rows.begin(0, prompt, 0, 0)
    rows.may_hold[0] = True
    holdings.allocate_blocks(request, pool.blocks_for(tokens))
    rows.plan_chunk(0, tokens, 1)
    rows.enter(0, RowPhase.DECODE)
    rows.note_launch(np.array([0]), 1, np.array([True]))
    return holdings, request


@pytest.mark.parametrize(("has_state", "found"), [(False, 2), (True, 1)])
def test_a_block_is_found_as_far_as_the_row_s_state_has_come_and_its_keys_though_it_was_held(
    has_state: bool, found: int
) -> None:
    """A row that waits has one token more in its blocks than its bounds say; its state is what its column says."""
    holdings, request = holding(2 * SIZE, has_state=has_state)
    rows = holdings.rows
    rows.correct_bounds(np.array([0]), 2, np.zeros(1, np.int64))
    rows.end_states(np.array([0]), np.array([2 * SIZE - 1]))
    holdings.release({block: (request, 0, place, 0) for place, block in enumerate(request.blocks)})
    holdings.make_some_findable()
    assert holdings.pool.findable == found


@pytest.mark.parametrize("is_held", [False, True])
def test_what_an_evicted_request_has_computed_is_what_its_row_has_at_least_and_a_token_more_if_it_waits(
    is_held: bool,
) -> None:
    holdings, request = holding(7, has_state=False)
    rows = holdings.rows
    if is_held:
        rows.correct_bounds(np.array([0]), 2, np.zeros(1, np.int64))
    rows.most_len[0] += 3
    holdings.evict(request)
    holdings.evicted(Eviction(request, 0, int(rows.epoch[0])))
    assert request.computed == 7
