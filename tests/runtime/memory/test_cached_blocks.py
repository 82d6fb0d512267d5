"""Cached blocks are given out in their order, whatever leaves it meanwhile, and what has left is not kept for long."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from random import Random

import pytest

from runahead.runtime.memory.block_column import CachedBlocks, in_bulk

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

    def pop(self, count: int) -> list[int]:
        return [self.blocks.popitem(last=False)[0] for _ in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_blocks_are_given_out_in_the_order_that_each_block_alone_would_have(seed: int) -> None:
    dice = Random(seed)
    cached, expected = CachedBlocks(BLOCKS), InOrder()
    for _ in range(60):
        inside, do = [*expected.blocks], dice.choice(["add", "add", "remove", "pop"])
        if do == "add":
            outside = sorted(set(range(BLOCKS)) - set(inside))
            blocks = dice.sample(outside, min(len(outside), dice.choice([1, 2, 30, 90])))
            if blocks:
                cached.add(array("i", blocks))
                expected.add(blocks)
        elif do == "pop":
            count = dice.randint(0, min(len(inside), dice.choice([2, BLOCKS])))
            assert cached.pop(count) == expected.pop(count)
        elif inside:
            begin, count = dice.randrange(len(inside)), dice.choice([1, 2, 30, 90])
            among = dice.choice([inside[begin : begin + count], dice.sample(inside, min(len(inside), count))])
            cached.remove(in_bulk(among))
            expected.remove(among)
        assert [*cached] == [*expected.blocks]
        assert len(cached) == len(expected.blocks)
        assert {block for block in range(BLOCKS) if block in cached} == expected.blocks.keys()
        assert cached.is_consistent()


@pytest.mark.parametrize("at_once", [1, 7, 50])
def test_a_prefix_that_is_shared_and_given_back_for_ever_leaves_no_more_gaps_than_blocks(at_once: int) -> None:
    """All but its first block is used again and again; nothing is given out, so that no group comes to its end."""
    cached, expected = CachedBlocks(1001), InOrder()
    cached.add(array("i", range(1, 1001)))
    expected.add([*range(1, 1001)])
    for turn in range(2000):
        begin = 2 + turn % (999 - at_once)
        used = [*range(begin, begin + at_once)]
        cached.remove(in_bulk(used))
        cached.add(array("i", used))
        expected.remove(used)
        expected.add(used)
        kept = sum(map(len, cached._groups.values()))
        assert kept <= 2 * len(cached) + 16 * len(cached._groups), f"{kept} entries for {len(cached)} blocks"
    assert [*cached] == [*expected.blocks]
    assert cached.is_consistent()


def test_gaps_of_the_oldest_group_are_not_given_out() -> None:
    cached = CachedBlocks(100)
    cached.add(array("i", range(1, 41)))
    cached.remove([40, 38, 1])
    assert cached.pop(3) == [39, 37, 36]
    assert cached.pop(34) == [*range(35, 1, -1)]
    assert len(cached) == 0
