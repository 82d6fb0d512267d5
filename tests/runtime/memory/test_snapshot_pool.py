"""Snapshots of states: where they are kept, and what of a cached prefix they let a row begin behind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from runahead.runtime.memory.block_pool import BlockPool, BlockPoolError
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT, PrefixWalk, SnapshotPool
from runahead.runtime.wire.prompts import Content, PrefixKeys

SIZE, EVERY = 4, 2
TOKENS = np.arange(100, 100 + 6 * SIZE + 1, dtype=np.int32)  # six full blocks, and a token that is never found


def contents() -> list[Content]:
    keys = PrefixKeys("")
    return [keys.content(place, TOKENS[place * SIZE : (place + 1) * SIZE].tobytes()) for place in range(6)]


def cached(pool: BlockPool, found: Sequence[Content]) -> list[int]:
    """These contents in blocks, or snapshots, that nobody holds. The first is given out first."""
    blocks = pool.allocate(len(found))
    for block, content in zip(blocks, found, strict=True):
        pool.make_findable(block, content)
        pool.fence([block])
        pool.release([block])
    return blocks


def looked_up(pool: BlockPool, snapshots: SnapshotPool) -> PrefixWalk:
    walk = PrefixWalk(pool, PrefixKeys(""), TOKENS, snapshots)
    assert walk.advance(100)
    return walk


def test_snapshots_are_kept_at_every_so_manyth_border() -> None:
    assert [place for place in range(7) if SnapshotPool(1, 3, SIZE).ends_at_boundary(place)] == [2, 5]
    assert not any(SnapshotPool(0, 3, SIZE).ends_at_boundary(place) for place in range(7)), "there is no room for any"


def test_a_pool_without_room_gives_nothing_out() -> None:
    pool = SnapshotPool(0, EVERY, SIZE)
    pool.check()
    assert (pool.total, pool.available) == (0, 0)
    with pytest.raises(BlockPoolError, match="1 blocks are asked for, 0 are available"):
        pool.allocate(1)


@pytest.mark.parametrize(("kept", "blocks"), [((), 0), ((1,), 2), ((1, 3), 4), ((3,), 4), ((1, 5), 6)])
def test_a_hit_ends_at_the_last_snapshot_of_what_was_found(kept: tuple[int, ...], blocks: int) -> None:
    pool, snapshots, found = BlockPool(20, SIZE), SnapshotPool(5, EVERY, SIZE), contents()
    in_blocks = cached(pool, found)
    places = cached(snapshots, [found[place] for place in kept])
    hit = looked_up(pool, snapshots).hit
    assert (list(hit.blocks), hit.unowned) == (in_blocks[:blocks], blocks)
    assert hit.snapshot == (places[-1] if kept else NO_SNAPSHOT)


def test_a_snapshot_beyond_the_blocks_that_are_left_is_of_no_use() -> None:
    pool, snapshots, found = BlockPool(20, SIZE), SnapshotPool(5, EVERY, SIZE), contents()
    cached(pool, found[:3])
    places = cached(snapshots, [found[1], found[3]])
    hit = looked_up(pool, snapshots).hit
    assert (len(hit.blocks), hit.snapshot) == (2, places[0])


def test_what_is_given_out_while_a_request_waits_is_not_begun_with() -> None:
    pool, snapshots, found = BlockPool(20, SIZE), SnapshotPool(2, EVERY, SIZE), contents()
    cached(pool, found)
    first, second = cached(snapshots, [found[3], found[1]])
    walk = looked_up(pool, snapshots)
    assert (len(walk.hit.blocks), walk.hit.snapshot) == (4, first)
    assert snapshots.allocate(1) == [first]
    assert (len(walk.hit.blocks), walk.hit.snapshot) == (2, second)
    pool.forget(list(walk.hit.blocks))
    assert walk.advance(100)
    assert (len(walk.hit.blocks), walk.hit.snapshot) == (0, NO_SNAPSHOT)


def test_what_a_row_begins_with_is_fenced_until_its_launch_has_retired() -> None:
    snapshots = SnapshotPool(2, EVERY, SIZE)
    (place,) = cached(snapshots, contents()[1:2])
    snapshots.begin_with(place)
    assert (snapshots.fenced, snapshots.cached, snapshots.found_total, snapshots.kept_total) == (1, 0, 1, 1)
    assert snapshots.release([place]) == [], "it is cached again"
    assert snapshots.cached == 1
