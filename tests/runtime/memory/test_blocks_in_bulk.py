"""Thousands of blocks change hands in one call as they would one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.runtime.memory.block_pool import BlockPool, BlockPoolError
from runahead.runtime.wire.prompts import Content

MANY = 40  # more than are looked at one by one


@dataclass
class Pools:
    """One pool is told of all blocks at once, the other of each alone. Both must say the same."""

    at_once: BlockPool = field(default_factory=lambda: BlockPool(4 * MANY, 16))
    one_by_one: BlockPool = field(default_factory=lambda: BlockPool(4 * MANY, 16))

    def allocate(self, count: int) -> list[int]:
        blocks = self.at_once.allocate(count)
        assert blocks == [self.one_by_one.allocate(1)[0] for _ in range(count)]
        return blocks

    def make_findable(self, block: int, content: Content) -> None:
        assert self.at_once.make_findable(block, content) == self.one_by_one.make_findable(block, content)

    def share(self, blocks: list[int]) -> None:
        self.at_once.share(blocks)
        for block in blocks:
            self.one_by_one.share([block])

    def fence(self, blocks: list[int]) -> None:
        self.at_once.fence(blocks)
        for block in blocks:
            self.one_by_one.fence([block])

    def release(self, blocks: list[int]) -> None:
        freed = self.at_once.release(blocks)
        assert freed == [gone for block in reversed(blocks) for gone in self.one_by_one.release([block])]

    def watch(self, contents: list[Content]) -> None:
        for pool in (self.at_once, self.one_by_one):
            pool.watch()
            for content in contents:
                pool.extend(content)

    def check(self) -> None:
        for pool in (self.at_once, self.one_by_one):
            pool.check()
        assert figures(self.at_once) == figures(self.one_by_one)


def figures(pool: BlockPool) -> tuple[object, ...]:
    watched = pool._watched
    return pool.free, [*pool._cached], pool.owned, pool.fenced, watched.unowned, watched.findable, [*watched.blocks]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_blocks_change_hands_in_bulk_as_they_do_one_by_one(data: st.DataObject) -> None:
    pools = Pools()
    held: list[list[int]] = []
    fenced: list[list[int]] = []
    contents: dict[int, Content] = {}
    for number in range(data.draw(st.integers(1, 30))):
        do = data.draw(st.sampled_from(["take", "make findable", "share", "fence", "release", "watch"]))
        if do == "take":
            blocks = pools.allocate(data.draw(st.integers(0, min(60, pools.at_once.available))))
            contents = {block: content for block, content in contents.items() if block not in blocks}
            held.append(blocks)
        elif do == "make findable" and held:
            for block in data.draw(st.sampled_from(held)):
                if block not in contents:
                    contents[block] = Content(b"%d of %d" % (block, number), b"tokens")
                    pools.make_findable(block, contents[block])
        elif do == "share" and contents:
            blocks = data.draw(st.permutations([*contents]))[: data.draw(st.integers(1, 100))]
            pools.share(blocks)
            held.append(blocks)
        elif do == "fence" and held:
            fenced.append(held.pop(data.draw(st.integers(0, len(held) - 1))))
            pools.fence(fenced[-1])
        elif do == "release" and fenced:
            pools.release(fenced.pop(data.draw(st.integers(0, len(fenced) - 1))))
        elif do == "watch":
            pools.watch(data.draw(st.permutations([*contents.values()])))
        pools.check()


@pytest.fixture
def pool() -> BlockPool:
    """Blocks 1 to MANY are owned and findable."""
    pool = BlockPool(2 * MANY, 16)
    for block in pool.allocate(MANY):
        pool.make_findable(block, Content(b"%d" % block, b"tokens"))
    return pool


@pytest.mark.parametrize("place", [0, 17, MANY - 1])
def test_one_of_many_that_is_not_findable_is_named_and_none_is_shared(pool: BlockPool, place: int) -> None:
    pool.forget([place + 1])
    with pytest.raises(BlockPoolError, match=f"^block {place + 1} is shared and its content is not findable$"):
        pool.share(range(1, MANY + 1))
    pool.fence(range(1, MANY + 1))
    assert (pool.owned, pool.fenced) == (0, MANY), "they have the holder that they had"


@pytest.mark.parametrize("place", [0, 17, MANY - 1])
def test_one_of_many_that_is_not_owned_is_named_and_none_is_given_up(pool: BlockPool, place: int) -> None:
    pool.fence([place + 1])
    with pytest.raises(BlockPoolError, match=f"^block {place + 1} is given up and was not owned$"):
        pool.fence(range(1, MANY + 1))
    pool.check()
    assert (pool.owned, pool.fenced) == (MANY - 1, 1)


@pytest.mark.parametrize("place", [0, 17, MANY - 1])
def test_one_of_many_that_is_not_fenced_is_named_and_none_is_released(pool: BlockPool, place: int) -> None:
    pool.fence([block for block in range(1, MANY + 1) if block != place + 1])
    with pytest.raises(BlockPoolError, match=f"^block {place + 1} is released and was not fenced$"):
        pool.release(range(1, MANY + 1))
    pool.check()
    assert (pool.owned, pool.fenced) == (1, MANY - 1)


def test_of_many_blocks_those_without_a_content_are_told(pool: BlockPool) -> None:
    pool.forget([3, 20, 7])
    assert pool.unfindable(range(MANY, 0, -1)) == [20, 7, 3]
    assert pool.unfindable([5, 7, 20]) == [7, 20]
