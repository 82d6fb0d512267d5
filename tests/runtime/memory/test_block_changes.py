"""What becomes findable and what is forgotten is recorded in order, and only of the empty salt."""

from __future__ import annotations

from runahead.runtime.memory.block_changes import BlockChanges
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import SnapshotPool
from runahead.runtime.wire.prompts import Content, PrefixKeys, empty_prefix

SIZE = 8
TOKENS = bytes(4 * SIZE)


def content(name: str, unsalted: bool = True) -> Content:
    return Content(name.encode(), TOKENS, b"", unsalted)


def names(changes: BlockChanges, position: int, most: int = 100) -> list[str] | None:
    found = changes.since(position, most)
    return None if found is None else [f"{'+' if one.is_stored else '-'}{one.content.key.decode()}" for one in found]


def test_a_key_says_whether_its_salt_is_empty() -> None:
    for salt in ("", "s"):
        keys = PrefixKeys(salt)
        first = keys.content(0, TOKENS)
        assert first.before == empty_prefix(salt) and first.unsalted == (not salt)
        assert keys.content(1, TOKENS).unsalted == (not salt)
        assert PrefixKeys(salt, first.key).sought(0, TOKENS) == first, "of a key that was given, too"


def test_a_pool_records_what_is_findable_and_what_is_forgotten_in_order() -> None:
    pool = BlockPool(4, SIZE)
    pool.changes = changes = BlockChanges(100)
    blocks = pool.allocate(3)
    assert pool.make_findable(blocks[0], content("a"))
    assert not pool.make_findable(blocks[1], content("a")), "another block has it: nothing has changed"
    pool.make_findable(blocks[1], content("salted", unsalted=False))
    pool.make_findable(blocks[2], content("b"))
    pool.forget([blocks[2]])
    pool.fence(blocks)
    pool.release(blocks)
    pool.allocate(3)  # of cached blocks, too
    assert names(changes, 0) == ["+a", "+b", "-b", "-a"]
    assert [one.group for one in changes.since(0, 1) or []] == [0]


def test_a_snapshot_is_recorded_under_its_own_group() -> None:
    pool = SnapshotPool(2, 1, SIZE)
    pool.changes = changes = BlockChanges(100)
    pool.make_findable(pool.allocate(1)[0], content("a"))
    assert [(one.group, one.is_stored) for one in changes.since(0, 1) or []] == [(1, True)]


def test_nothing_is_recorded_where_nobody_follows() -> None:
    pool = BlockPool(4, SIZE)
    pool.make_findable(pool.allocate(1)[0], content("a"))
    assert pool.changes is None and pool.findable == 1


def test_what_is_there_already_is_told_by_blocks() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(3)
    pool.make_findable(blocks[0], content("a"))
    pool.make_findable(blocks[2], content("salted", unsalted=False))
    assert pool.unsalted_contents(1, 4) == [content("a")]
    assert pool.unsalted_contents(2, 4) == []


def test_who_stays_behind_by_more_than_the_limit_has_lost_some() -> None:
    changes = BlockChanges(3)
    for name in "abc":
        changes.record(0, True, content(name))
    assert names(changes, 0) == ["+a", "+b", "+c"] and names(changes, 1, 1) == ["+b"]
    changes.record(0, True, content("d"))
    assert names(changes, 0) is None and names(changes, 2) is None
    assert names(changes, 3) == ["+d"] and changes.end == 4


def test_changes_that_nobody_asks_for_any_more_are_dropped() -> None:
    changes = BlockChanges(3)
    for name in "abc":
        changes.record(0, True, content(name))
    changes.drop(2)
    changes.drop(1)
    assert names(changes, 1) is None and names(changes, 2) == ["+c"] and changes.end == 3
