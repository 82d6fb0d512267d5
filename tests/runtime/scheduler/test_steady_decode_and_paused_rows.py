"""A row that waits for a block goes on with the first plan that has one, whatever the others do meanwhile."""

from __future__ import annotations

import pytest

from runahead.runtime.scheduler.plan_builder import Planned
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import SHORTAGE, whole

WAITS, GOES_ON, ENDS = [3] * 13, [4] * 6, [5] * 5


def one_waits_for_what_is_coming(depth: int) -> Chain:
    """Request 1 lacks a block at SHORTAGE. Request 2 needs none for a while. Those of request 3, which has ended
    unforeseen, are coming, and it is `depth` launches until they are there."""
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 8)
    chain.submit(1, WAITS, max_tokens=40, ignore_eos=True)
    chain.submit(2, GOES_ON, max_tokens=40, ignore_eos=True)
    last = SHORTAGE - depth - 2
    stop = whole(ENDS, 20)[last]
    assert stop not in whole(ENDS, 20)[:last]
    chain.submit(3, ENDS, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    return chain


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_paused_row_goes_on_with_the_first_plan_after_its_blocks_have_come(depth: int) -> None:
    chain = one_waits_for_what_is_coming(depth)
    scheduler, plan = chain.engine.scheduler, chain.engine.scheduler.plan
    seen: list[
        tuple[int, bool]
    ] = []  # of each plan: blocks to be had when it was made, and whether a row waits for one

    def watched() -> Planned | None:
        blocks, made = scheduler.pool.available, plan()
        seen.append((blocks, bool(scheduler.holdings.paused)))
        return made

    scheduler.plan = watched  # type: ignore[method-assign]
    chain.run()
    waited = [blocks for blocks, waits in seen if waits]
    assert len(waited) > 1, "others went on without it for more than one launch: as in steady decode"
    assert not any(waited), "a block was there and the row that needed it was not asked"
    assert chain.tokens()[1] == whole(WAITS, 40)
    assert chain.tokens()[2] == whole(GOES_ON, 40)
    chain.check_nothing_is_left()
