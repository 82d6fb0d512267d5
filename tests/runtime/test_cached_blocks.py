"""Cached blocks are given out in their order, whatever leaves it meanwhile, and what has left is not kept for long."""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.block_column import in_bulk
from runtime.cached_blocks import CachedBlocks

BLOCKS = 200


class InOrder:
    """The same order, kept block by block."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: list[int]) -> None:
        self.blocks.update(dict.fromkeys(reversed(blocks)))

    def remove(self, blocks: list[int]) -> None:
        for block in blocks:
            del self.blocks[block]

    def take(self, count: int) -> list[int]:
        return [self.blocks.popitem(last=False)[0] for _ in range(count)]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_blocks_are_given_out_in_the_order_that_each_block_alone_would_have(data: st.DataObject) -> None:
    cached, expected = CachedBlocks(BLOCKS), InOrder()
    for _ in range(data.draw(st.integers(1, 25))):
        do = data.draw(st.sampled_from(["add", "remove", "take"]))
        if do == "add":
            outside = [block for block in range(BLOCKS) if block not in expected.blocks]
            blocks = data.draw(st.permutations(outside))[: data.draw(st.sampled_from([1, 2, 30, 90]))]
            if blocks:
                cached.add(array("i", blocks))
                expected.add(blocks)
        elif expected.blocks and do == "remove":
            blocks = data.draw(st.permutations([*expected.blocks]))[: data.draw(st.sampled_from([1, 2, 30, 90]))]
            cached.remove(in_bulk(blocks))
            expected.remove(blocks)
        elif do == "take":
            count = data.draw(st.integers(0, len(expected.blocks)))
            assert cached.take(count) == expected.take(count)
        assert [*cached] == [*expected.blocks]
        assert len(cached) == len(expected.blocks)
        assert [block in cached for block in range(BLOCKS)] == [block in expected.blocks for block in range(BLOCKS)]
        assert cached.is_consistent()


@pytest.mark.parametrize("at_once", [1, 7, 50])
def test_a_prefix_that_is_shared_and_given_back_for_ever_leaves_no_more_gaps_than_blocks(at_once: int) -> None:
    """All but its first block is used again and again; nothing is taken, so that no group comes to its end."""
    cached = CachedBlocks(1001)
    cached.add(array("i", range(1, 1001)))
    for turn in range(2000):
        used = np.arange(2 + turn % (999 - at_once), 2 + turn % (999 - at_once) + at_once)
        cached.remove(in_bulk(used.tolist()))
        cached.add(array("i", used.tolist()))
        kept = sum(map(len, cached._groups.values()))
        assert kept <= 2 * len(cached) + 16 * len(cached._groups), f"{kept} entries for {len(cached)} blocks"
    assert next(iter(cached)) == 1 or cached.take(1)
    assert cached.is_consistent()


def test_gaps_of_the_oldest_group_are_not_given_out() -> None:
    cached = CachedBlocks(100)
    cached.add(array("i", range(1, 41)))
    cached.remove([40, 38, 1])
    assert cached.take(3) == [39, 37, 36]
    assert cached.take(34) == [*range(35, 1, -1)]
    assert len(cached) == 0
