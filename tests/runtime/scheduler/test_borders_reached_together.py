"""Rows that came together fill their blocks with the same launch: the prefix cache takes them in turn by turn."""

from __future__ import annotations

import pytest

from tests.runtime.chain import Chain, make_chain
from tests.runtime.pressure import whole

ROWS, BLOCK, PER_TURN = 60, 8, 48


def prompt_of(handle: int) -> list[int]:
    return [handle + 1, handle // 7 + 2, 3, handle + 1]


def together(max_tokens: int, run_ahead: int = 1) -> Chain:
    """All rows decode, none has filled a block, and they fill their first one with the same launch."""
    chain = make_chain(run_ahead, max_rows=ROWS, num_blocks=400, max_prefill_tokens=4 * ROWS)
    for handle in range(1, ROWS + 1):
        chain.submit(handle, prompt_of(handle), max_tokens=max_tokens, ignore_eos=True)
    return chain


def settle_borders(chain: Chain, blocks: int = ROWS) -> list[int]:
    """How many more blocks could be found after each turn, until so many are: the first of every row."""
    gained: list[int] = []
    while chain.engine.scheduler.pool.findable < blocks:
        before = chain.engine.scheduler.pool.findable
        chain.turn()
        gained.append(chain.engine.scheduler.pool.findable - before)
        assert len(gained) < 100, "some blocks are never found"
    return gained


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_blocks_that_are_full_at_once_are_findable_a_few_a_turn(run_ahead: int) -> None:
    chain = together(max_tokens=60, run_ahead=run_ahead)
    gained = settle_borders(chain)
    assert max(gained) == PER_TURN, "so many were due at once, and no more joined the prefix cache"
    assert sum(gained) >= ROWS
    chain.run()
    chain.check_nothing_is_left()


def test_of_many_blocks_that_are_full_at_once_an_eighth_is_findable_with_a_turn() -> None:
    """A long prompt in one chunk: a few a turn would leave its last blocks behind for many turns."""
    count, size = 10 * PER_TURN, 2
    tokens = size * count
    chain = make_chain(
        num_blocks=count + 40,
        block_size=size,
        context_length=tokens + 40,
        prefill_chunk=tokens,
        max_prefill_tokens=tokens,
    )
    chain.submit(1, [i % 97 + 2 for i in range(tokens)], max_tokens=40, ignore_eos=True)
    gained = settle_borders(chain, count)
    assert gained[:2] == [count // 8, (count - count // 8) // 8]
    assert {*gained[2:-1]} == {PER_TURN}, "where an eighth is less than a few, a few"
    chain.run()
    chain.check_nothing_is_left()


def test_a_row_that_ends_before_its_turn_has_its_blocks_found_nevertheless() -> None:
    chain = together(max_tokens=BLOCK - 2)  # the last token, the tenth, comes two launches after the block is full
    chain.run()
    assert chain.engine.scheduler.pool.findable == ROWS
    chain.check_nothing_is_left()
    for handle in (1, ROWS):
        chain.submit(100 + handle, [*prompt_of(handle), *chain.tokens()[handle], 5], max_tokens=2, ignore_eos=True)
    chain.run()
    assert [chain.admitted()[100 + handle].cached_tokens for handle in (1, ROWS)] == [BLOCK, BLOCK]
    assert chain.tokens()[101] == whole([*prompt_of(1), *chain.tokens()[1], 5], 2)
