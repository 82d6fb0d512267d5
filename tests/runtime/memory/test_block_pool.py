"""Blocks change hands only as they may, and are found again by their content."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runahead.runtime.memory.block_pool import NULL_BLOCK, BlockPool, BlockPoolError
from runahead.runtime.wire.prompts import Content


def content(name: str, tokens: bytes = b"tokens") -> Content:
    return Content(name.encode(), tokens)


def places(pool: BlockPool) -> tuple[int, int, int, int]:
    """(free, cached, owned, fenced), checked."""
    pool.check()
    return pool.free, pool.cached, pool.owned, pool.fenced


def cached_pool(*names: str, num_blocks: int = 5) -> tuple[BlockPool, list[int]]:
    """A pool in which a block of each name is cached, released in that order, and the blocks."""
    pool = BlockPool(num_blocks, 16)
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        assert pool.make_findable(block, content(name))
        pool.fence([block])
        pool.release([block])
    return pool, blocks


# ---------------------------------------------------------------- allocated, fenced, released


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(9, 16)
    blocks = pool.allocate(pool.available)
    assert sorted(blocks) == list(range(1, 9))
    assert NULL_BLOCK not in blocks
    assert places(pool) == (0, 0, 8, 0)


def test_a_pool_without_a_block_to_give_is_refused() -> None:
    with pytest.raises(BlockPoolError, match="a pool of 1 blocks"):
        BlockPool(1, 16)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(9, 16).blocks_for(tokens) == blocks


def test_a_fenced_block_is_coming_but_not_available() -> None:
    pool = BlockPool(5, 16)
    blocks = pool.allocate(4)
    pool.fence(blocks[:3])
    assert places(pool) == (0, 0, 1, 3)
    assert pool.available == 0
    with pytest.raises(BlockPoolError, match="1 blocks are asked for, 0 are available"):
        pool.allocate(1)
    assert sorted(pool.release(blocks[:3])) == sorted(blocks[:3])
    assert places(pool) == (3, 0, 1, 0)
    assert sorted(pool.allocate(3)) == sorted(blocks[:3])


def test_a_block_is_fenced_and_released_once() -> None:
    pool = BlockPool(9, 16)
    blocks = pool.allocate(1)
    pool.fence(blocks)
    with pytest.raises(BlockPoolError, match=f"block {blocks[0]} is given up and was not owned"):
        pool.fence(blocks)
    pool.release(blocks)
    with pytest.raises(BlockPoolError, match=f"block {blocks[0]} is released and was not fenced"):
        pool.release(blocks)


def test_a_block_that_is_owned_is_not_released() -> None:
    pool = BlockPool(9, 16)
    with pytest.raises(BlockPoolError, match="was not fenced"):
        pool.release(pool.allocate(1))


# ---------------------------------------------------------------- shared


def test_a_shared_block_is_owned_until_its_last_holder_gives_it_up() -> None:
    pool = BlockPool(5, 16)
    (block,) = pool.allocate(1)
    pool.make_findable(block, content("a"))
    pool.share([block])
    pool.fence([block])
    assert pool.release([block]) == []
    assert places(pool) == (3, 0, 1, 0)
    pool.fence([block])
    assert places(pool) == (3, 0, 0, 1)
    assert pool.release([block]) == [], "it is cached, its content stays"
    assert places(pool) == (3, 1, 0, 0)


def test_a_block_that_two_gave_up_is_free_when_the_last_launch_of_both_has_retired() -> None:
    pool = BlockPool(5, 16)
    (block,) = pool.allocate(1)
    pool.make_findable(block, content("a"))
    pool.share([block])
    pool.fence([block])
    pool.fence([block])
    assert places(pool) == (3, 0, 0, 1)
    pool.release([block])
    assert places(pool) == (3, 0, 0, 1), "a launch of the other holder still names it"
    pool.release([block])
    assert places(pool) == (3, 1, 0, 0)


def test_a_fenced_block_that_is_shared_is_owned_again_and_its_fence_frees_nothing() -> None:
    pool = BlockPool(5, 16)
    (block,) = pool.allocate(1)
    pool.make_findable(block, content("a"))
    pool.fence([block])
    pool.share([block])
    assert places(pool) == (3, 0, 1, 0)
    assert pool.release([block]) == []
    assert places(pool) == (3, 0, 1, 0)


def test_a_cached_block_that_is_shared_is_not_available() -> None:
    pool, (block,) = cached_pool("a")
    watched = pool.watch()
    assert pool.extend(content("a"))
    assert (pool.available, watched.unowned) == (4, 1)
    pool.share([block])
    assert (pool.available, watched.unowned) == (3, 0)
    assert places(pool) == (3, 0, 1, 0)


def test_only_a_findable_block_is_shared() -> None:
    pool = BlockPool(5, 16)
    (block,) = pool.allocate(1)
    with pytest.raises(BlockPoolError, match=f"block {block} is shared and its content is not findable"):
        pool.share([block])


# ---------------------------------------------------------------- found again


def test_a_block_is_found_by_its_content_in_every_hand_but_not_after_it_was_reused() -> None:
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1)
    assert pool.find(content("a")) is None
    assert pool.make_findable(block, content("a"))
    found = [pool.find(content("a"))]
    pool.fence([block])
    found.append(pool.find(content("a")))
    pool.release([block])
    found.append(pool.find(content("a")))
    assert found == [block] * 3
    assert block in pool.allocate(2)
    assert pool.find(content("a")) is None
    assert pool.findable == 0
    pool.check()


def test_a_key_that_two_contents_share_finds_only_the_tokens_that_are_there() -> None:
    pool, (block,) = cached_pool("a")
    assert pool.find(content("a", b"tokens")) == block
    assert pool.find(content("a", b"others")) is None
    (other,) = pool.allocate(1)
    assert not pool.make_findable(other, content("a", b"others"))
    assert pool.find(content("a", b"tokens")) == block


def test_what_is_found_already_is_not_made_findable_again() -> None:
    pool = BlockPool(5, 16)
    first, second = pool.allocate(2)
    assert pool.make_findable(first, content("a"))
    assert not pool.make_findable(second, content("a"))
    assert not pool.make_findable(first, content("b")), "a block has one content"
    assert pool.find(content("a")) == first
    assert pool.find(content("b")) is None
    pool.fence([second])
    assert pool.release([second]) == [second], "it is not findable: free at once"


def test_a_block_behind_the_fence_may_be_made_findable() -> None:
    pool = BlockPool(5, 16)
    (block,) = pool.allocate(1)
    pool.fence([block])
    assert pool.make_findable(block, content("a"))
    assert pool.release([block]) == []
    assert places(pool) == (3, 1, 0, 0)


def test_a_free_block_is_not_made_findable() -> None:
    with pytest.raises(BlockPoolError, match="block 1 is made findable and has no owner"):
        BlockPool(5, 16).make_findable(1, content("a"))


def test_a_forgotten_block_is_free_when_it_is_released() -> None:
    pool = BlockPool(5, 16)
    blocks = pool.allocate(2)
    pool.make_findable(blocks[0], content("a"))
    pool.forget(blocks)
    assert pool.find(content("a")) is None
    pool.fence(blocks)
    assert sorted(pool.release(blocks)) == sorted(blocks)
    assert places(pool) == (4, 0, 0, 0)


def test_a_forgotten_block_that_nobody_holds_is_free() -> None:
    pool, (cached, other) = cached_pool("a", "b")
    pool.forget(pool.holding([content("a").key, b"nobody's"]))
    assert pool.find(content("a")) is None
    assert pool.find(content("b")) == other
    assert (pool.free, pool.cached) == (3, 1)
    pool.check()
    assert cached in pool.allocate(3)


def test_free_blocks_are_given_out_before_cached_ones() -> None:
    pool, (cached,) = cached_pool("a")
    assert cached not in pool.allocate(3)
    assert pool.find(content("a")) == cached
    assert pool.allocate(1) == [cached]


def test_cached_blocks_are_given_out_least_recently_used_first() -> None:
    pool, blocks = cached_pool("a", "b", "c", "d")
    pool.share([blocks[0]])
    pool.fence([blocks[0]])
    pool.release([blocks[0]])  # used again, after the others
    assert pool.allocate(4) == [blocks[1], blocks[2], blocks[3], blocks[0]]


def test_of_blocks_released_together_the_last_is_given_out_first() -> None:
    pool = BlockPool(5, 16)
    prefix = pool.allocate(4)
    for block in prefix:
        pool.make_findable(block, content(str(block)))
    pool.fence(prefix)
    pool.release(prefix)
    assert pool.allocate(4) == prefix[::-1], (
        "the deepest block of a prefix first: it is worth nothing without the others"
    )


# ---------------------------------------------------------------- proof


def break_free_list(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def break_places(pool: BlockPool) -> None:
    pool._free.append(next(iter(pool._cached)))


def break_coming(pool: BlockPool) -> None:
    pool._coming += 1


def lose_a_block(pool: BlockPool) -> None:
    pool._free.pop()


def break_a_count(pool: BlockPool) -> None:
    pool._fences.one[pool._free[0]] = -1


def break_the_cache(pool: BlockPool) -> None:
    pool._forget(next(iter(pool._cached)), is_unowned=True)


def name_a_free_block(pool: BlockPool) -> None:
    pool._contents[pool._free[0]] = content("z")
    pool._is_findable.one[pool._free[0]] = True


def call_findable_what_has_no_content(pool: BlockPool) -> None:
    (block,) = set(range(1, 6)) - {*pool._free, *pool._cached}
    pool._is_findable.one[block] = True


def miscount_a_group(pool: BlockPool) -> None:
    pool._cached._sizes[next(iter(pool._cached._sizes))] += 1


def miscount_the_cached(pool: BlockPool) -> None:
    pool._cached._count += 1


def break_the_keys(pool: BlockPool) -> None:
    pool._by_key[b"z"] = next(iter(pool._cached))


def miscount_the_watched(pool: BlockPool) -> None:
    pool.watch().unowned += 1


def watch_what_is_not_findable(pool: BlockPool) -> None:
    pool.watch().add(pool._free[0], is_unowned=False)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (break_free_list, "free twice"),
        (break_places, "in two places"),
        (break_coming, r"3 free \+ 1 cached \+ 1 owned \+ 1 fenced is not 5"),
        (lose_a_block, r"2 free \+ 1 cached \+ 1 owned \+ 0 fenced is not 5"),
        (break_a_count, "negative count of owners or fences"),
        (break_the_cache, "a cached block is not findable"),
        (name_a_free_block, "or a free one is"),
        (call_findable_what_has_no_content, "what is findable and what has a content"),
        (miscount_a_group, "groups of cached blocks are miscounted"),
        (miscount_the_cached, "groups of cached blocks are miscounted"),
        (break_the_keys, "keys and contents"),
        (miscount_the_watched, "the watched blocks that are available are miscounted"),
        (watch_what_is_not_findable, "said to be findable and is not"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_pool_is_found(broken: Callable[[BlockPool], None], sentence: str) -> None:
    pool, _ = cached_pool("a", num_blocks=6)
    pool.allocate(1)
    assert places(pool) == (3, 1, 1, 0)
    broken(pool)
    with pytest.raises(BlockPoolError, match=sentence):
        pool.check()
