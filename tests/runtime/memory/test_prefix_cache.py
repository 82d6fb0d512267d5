"""A prefix is found by its tokens, their places and its salt, and never whole."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import PrefixWalk
from runahead.runtime.wire.prompts import Content, PrefixKeys, prompt_keys

SIZE = 4


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def contents(tokens: NDArray[np.int32], salt: str = "") -> list[Content]:
    """Of every full block, in order."""
    keys = PrefixKeys(salt)
    return [keys.content(i, tokens[i * SIZE : (i + 1) * SIZE].tobytes()) for i in range(tokens.size // SIZE)]


def key(tokens: NDArray[np.int32], place: int, salt: str = "") -> bytes:
    return contents(tokens, salt)[place].key


def holding(tokens: NDArray[np.int32], salt: str = "") -> tuple[BlockPool, list[int]]:
    """A pool in which every full block of `tokens` is findable, and those blocks."""
    pool = BlockPool(20, SIZE)
    blocks = pool.allocate(tokens.size // SIZE)
    for block, content in zip(blocks, contents(tokens, salt), strict=True):
        assert pool.make_findable(block, content)
    return pool, blocks


def walked(pool: BlockPool, keys: PrefixKeys, tokens: NDArray[np.int32]) -> list[int]:
    """Blocks of a walk to its end."""
    walk = PrefixWalk(pool, keys, tokens)
    assert walk.advance(tokens.size)
    return [*walk.hit.blocks]


def test_a_key_is_that_of_all_tokens_up_to_the_blocks_end() -> None:
    tokens = ids(*range(12))
    assert key(tokens, 1) == key(ids(*range(8)), 1)
    for changed in range(8):
        other = tokens.copy()
        other[changed] += 50
        assert key(other, 1) != key(tokens, 1), f"token {changed} counts"
    other[:] = tokens
    other[8] += 50
    assert key(other, 1) == key(tokens, 1), "what follows the block does not"


def test_the_same_tokens_at_another_place_have_another_key() -> None:
    tokens = ids(7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7)
    assert len({key(tokens, index) for index in range(3)}) == 3


def test_a_key_depends_on_the_salt() -> None:
    tokens = ids(*range(8))
    keys = {key(tokens, index, salt) for index in (0, 1) for salt in ("", "a", "b")}
    assert len(keys) == 6


def test_the_content_of_a_block_is_its_own_token_ids() -> None:
    first, second = contents(ids(*range(8)))
    assert first.tokens == ids(0, 1, 2, 3).tobytes()
    assert second.tokens == ids(4, 5, 6, 7).tobytes()


def test_a_place_that_comes_again_has_the_key_that_it_had() -> None:
    tokens = ids(*range(16))
    keys = PrefixKeys("s")
    for place in (0, 1, 0, 2, 1, 3, 3):
        block = tokens[place * SIZE : (place + 1) * SIZE].tobytes()
        assert keys.content(place, block) == contents(tokens, "s")[place]


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (40, 3)])
def test_the_block_of_the_last_token_is_never_found(length: int, found: int) -> None:
    pool, blocks = holding(ids(*range(12)))
    tokens = ids(*range(12), *range(60, 88))[:length]
    assert walked(pool, PrefixKeys(""), tokens) == blocks[:found]


def test_a_prefix_ends_at_the_first_block_that_is_not_there() -> None:
    tokens = ids(*range(16))
    pool, blocks = holding(tokens)
    pool.forget([blocks[1]])
    assert walked(pool, PrefixKeys(""), tokens) == blocks[:1], "block 2 is there, and of no use"


def test_another_salt_finds_nothing() -> None:
    tokens = ids(*range(16))
    pool, blocks = holding(tokens, "mine")
    assert walked(pool, PrefixKeys("mine"), tokens) == blocks[:3]
    assert walked(pool, PrefixKeys("yours"), tokens) == []


def test_a_forged_key_finds_nothing_since_the_token_ids_are_compared() -> None:
    tokens = ids(*range(8))
    pool = BlockPool(20, SIZE)
    (block,) = pool.allocate(1)
    honest = contents(tokens)[0]
    pool.make_findable(block, Content(honest.key, ids(90, 91, 92, 93).tobytes()))
    assert walked(pool, PrefixKeys(""), tokens) == []
    pool.forget([block])
    pool.make_findable(block, honest)
    assert walked(pool, PrefixKeys(""), tokens) == [block]


def test_finding_changes_nothing() -> None:
    tokens = ids(*range(16))
    pool, blocks = holding(tokens)
    pool.fence(blocks)
    pool.release(blocks)
    before = (pool.free, pool.cached, pool.owned, pool.fenced)
    assert walked(pool, PrefixKeys(""), tokens) == blocks[:3]
    assert (pool.free, pool.cached, pool.owned, pool.fenced) == before
    pool.allocate(pool.free)
    assert pool.allocate(1) == [blocks[3]], "and not the order in which blocks are given out"


def test_no_salt_stands_for_a_block_behind_a_key() -> None:
    """A salt that spells a key and the tokens of a block would have that block's key before its own first block."""
    spelled = b"k" * 32 + ids(*[0x6B6B6B6B] * SIZE).tobytes()
    block = Content(sha256(spelled).digest(), spelled[32:])
    behind = PrefixKeys("")
    behind._keys = [block.key]
    tokens = ids(1, 2, 3, 4)
    assert key(tokens, 0, spelled.decode()) != behind.content(0, tokens.tobytes()).key


# ---------------------------------------------------------------- a walk that is kept


def test_keys_that_were_made_elsewhere_are_those_that_would_be_made_here() -> None:
    tokens = ids(*range(2, 23))
    given = PrefixKeys("salt", prompt_keys("salt", tokens, SIZE))
    hashed = PrefixKeys("salt")
    for place in range(5):
        content = tokens[place * SIZE : (place + 1) * SIZE].tobytes()
        assert given.content(place, content) == hashed.content(place, content)
    behind = ids(7, 8, 9, 10).tobytes()
    assert given.content(5, behind) == hashed.content(5, behind), "and those behind them go on from there"


def counted(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> list[Content]:
    """What is looked up from now on."""
    looked_up: list[Content] = []
    find = pool.find

    def noted(content: Content) -> int | None:
        looked_up.append(content)
        return find(content)

    monkeypatch.setattr(pool, "find", noted)
    return looked_up


def test_a_long_prefix_is_looked_up_in_pieces_and_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ids(*range(17 * SIZE))
    pool, blocks = BlockPool(40, SIZE), []
    blocks = pool.allocate(17)
    for block, content in zip(blocks, contents(tokens), strict=True):
        pool.make_findable(block, content)
    looked_up = counted(pool, monkeypatch)
    walk = PrefixWalk(pool, PrefixKeys(""), tokens)
    assert not walk.advance(5)
    assert not walk.advance(5)
    assert [*walk.hit.blocks] == blocks[:10]
    assert not walk.advance(5)
    assert walk.advance(5)
    assert [*walk.hit.blocks] == blocks[:16], "never the one that holds the last token"
    for _ in range(100):
        assert walk.advance(5)
    assert len(looked_up) == 16


def test_a_walk_that_ended_looks_at_its_end_alone_and_goes_on_when_the_next_block_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = ids(*range(5 * SIZE))
    pool, blocks = holding(tokens)
    pool.forget(blocks[2:3])
    looked_up = counted(pool, monkeypatch)
    walk = PrefixWalk(pool, PrefixKeys(""), tokens)
    assert walk.advance(9)
    assert [*walk.hit.blocks] == blocks[:2]
    looked_up.clear()
    for _ in range(10):
        assert walk.advance(9)
    assert len(looked_up) == 10
    assert pool.make_findable(blocks[2], contents(tokens)[2])
    assert walk.advance(9)
    assert [*walk.hit.blocks] == blocks[:4]


def test_a_walk_loses_what_is_forgotten_and_all_that_is_behind_it() -> None:
    tokens = ids(*range(6 * SIZE))
    pool, blocks = holding(tokens)
    walk = PrefixWalk(pool, PrefixKeys(""), tokens)
    assert walk.advance(9)
    assert ([*walk.hit.blocks], walk.hit.unowned) == (blocks[:5], 0)
    pool.fence(blocks)
    pool.release(blocks)
    assert walk.hit.unowned == 5
    pool.share(blocks[:1])
    assert walk.hit.unowned == 4
    pool.forget(blocks[3:4])
    pool.check()
    assert walk.advance(9)
    assert ([*walk.hit.blocks], walk.hit.unowned) == (blocks[:3], 2)
    assert pool.allocate(pool.free + 3), "the deepest are given out first"
    pool.check()
    assert walk.advance(9)
    assert ([*walk.hit.blocks], walk.hit.unowned) == (blocks[:2], 1)
