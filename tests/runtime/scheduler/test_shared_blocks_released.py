"""Blocks released together, one of them still named for another holder: the others are free all the same."""

from __future__ import annotations

import pytest

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.wire.prompts import Content


@pytest.mark.parametrize("still_named", [0, 1, 2])
def test_a_block_that_is_still_named_keeps_none_of_its_neighbours(still_named: int) -> None:
    pool = BlockPool(9, 16)
    blocks = pool.allocate(3)
    pool.make_findable(blocks[still_named], Content(b"key", b"tokens"))
    pool.share([blocks[still_named]])
    pool.fence(blocks)
    pool.fence([blocks[still_named]])
    freed = pool.release(blocks)
    assert freed == [block for block in reversed(blocks) if block != blocks[still_named]]
    assert (pool.free, pool.fenced) == (7, 1)
    pool.release([blocks[still_named]])
    assert (pool.free, pool.cached) == (7, 1)
    pool.check()


@pytest.mark.parametrize("still_held", [0, 1, 2])
def test_a_block_that_is_still_held_keeps_none_of_its_neighbours(still_held: int) -> None:
    pool = BlockPool(9, 16)
    blocks = pool.allocate(3)
    pool.make_findable(blocks[still_held], Content(b"key", b"tokens"))
    pool.share([blocks[still_held]])
    pool.fence(blocks)
    assert pool.release(blocks) == [block for block in reversed(blocks) if block != blocks[still_held]]
    assert (pool.free, pool.owned, pool.fenced) == (7, 1, 0)
    pool.check()
