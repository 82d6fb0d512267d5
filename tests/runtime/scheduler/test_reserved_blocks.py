"""Blocks that are reserved for a border that a launch will cross."""

from __future__ import annotations

import pytest

from runahead.runtime.scheduler.ledger import Launch
from tests.runtime.chain import make_chain


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_blocks_that_a_launch_without_sample_rows_reserves_are_settled_too(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(depth, num_blocks=9)
    launches: list[Launch] = []
    enqueue = chain.ledger.enqueue

    def noted(launch: Launch) -> None:
        launches.append(launch)
        enqueue(launch)

    monkeypatch.setattr(chain.ledger, "enqueue", noted)
    for handle in (1, 2):  # both wait for a block in the end, so that a launch has no rows, and the next none to sample
        chain.submit(handle, [handle + 2] * 20, max_tokens=30, ignore_eos=True)
    chain.run()
    assert any(launch.crossed_slots.size and not launch.shape.sample_rows for launch in launches)
    chain.check_nothing_is_left()
