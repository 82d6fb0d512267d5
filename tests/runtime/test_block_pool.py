"""Blocks change hands only as they may."""

from __future__ import annotations

import pytest

from runtime.block_pool import NULL_BLOCK, BlockPool, BlockPoolError


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(9, 16)
    assert pool.promise(8)
    assert sorted(pool.take(8)) == list(range(1, 9))
    assert NULL_BLOCK not in range(1, 9)


def test_a_fenced_block_does_not_count_as_free() -> None:
    pool = BlockPool(5, 16)
    assert pool.promise(4)
    blocks = pool.take(4)
    pool.fence(blocks)
    assert (pool.free, pool.owned, pool.fenced) == (0, 0, 4)
    assert not pool.promise(1)
    pool.release(blocks)
    assert pool.promise(4)
    pool.check()


def test_a_promise_is_refused_where_others_were_promised_the_same_blocks() -> None:
    pool = BlockPool(9, 16)
    assert pool.promise(5)
    assert not pool.promise(4)
    pool.withdraw(2)
    assert pool.promise(4)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(9, 16).blocks_for(tokens) == blocks


def test_what_was_not_promised_cannot_be_taken() -> None:
    with pytest.raises(BlockPoolError, match="1 blocks taken, 0 promised"):
        BlockPool(9, 16).take(1)


def test_a_promise_that_was_not_given_cannot_be_withdrawn() -> None:
    with pytest.raises(BlockPoolError, match="withdrawn"):
        BlockPool(9, 16).withdraw(1)


def test_a_block_is_fenced_and_released_once() -> None:
    pool = BlockPool(9, 16)
    pool.promise(1)
    blocks = pool.take(1)
    pool.fence(blocks)
    with pytest.raises(BlockPoolError, match="was not owned"):
        pool.fence(blocks)
    pool.release(blocks)
    with pytest.raises(BlockPoolError, match="was not fenced"):
        pool.release(blocks)


def test_a_pool_without_a_block_to_give_is_refused() -> None:
    with pytest.raises(BlockPoolError):
        BlockPool(1, 16)
