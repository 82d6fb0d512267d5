"""A front end that follows the prefix cache is answered when something has changed, and costs nothing when gone."""

from __future__ import annotations

from runahead.runtime.engine.publisher import KvFollowers
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import SnapshotPool
from runahead.runtime.wire.kv_events import KvQuery, KvReply
from runahead.runtime.wire.prompts import PrefixKeys
from tests.runtime.chain import Chain, MemoryLinks, make_chain

SIZE = 8


def replies(chain: Chain, owner: int) -> list[KvReply]:
    return [said for to, said in chain.links.sent if to == owner and isinstance(said, KvReply)]


def test_what_is_there_is_told_first_and_then_what_changes_to_each_in_its_own_time() -> None:
    chain = make_chain(block_size=SIZE)
    chain.submit(1, list(range(4, 24)), max_tokens=4, ignore_eos=True)
    chain.run()
    chain.tell(KvQuery(5), owner=2)
    chain.turn_until(lambda: replies(chain, 2))
    (first,) = replies(chain, 2)
    told = first.changes
    assert (first.call, first.cleared, first.is_whole) == (5, True, True)
    assert [change.tokens for change in told] and len(told) == chain.engine.scheduler.pool.findable
    chain.tell(KvQuery(6), owner=2)
    chain.turn()
    assert len(replies(chain, 2)) == 1, "nothing has changed"
    chain.submit(2, list(range(30, 60)), max_tokens=4, ignore_eos=True)
    chain.run()
    chain.turn()
    (_, last) = replies(chain, 2)
    assert last.call == 6 and not last.cleared and last.changes
    assert all(change.is_stored for change in last.changes)


def test_nothing_is_recorded_while_nobody_follows() -> None:
    chain = make_chain(block_size=SIZE)
    chain.submit(1, list(range(4, 24)), max_tokens=4, ignore_eos=True)
    chain.run()
    assert chain.engine.scheduler.pool.changes is None and not chain.engine.intake._followers.has_more


def test_nothing_is_recorded_once_the_last_follower_is_gone() -> None:
    chain = make_chain(block_size=SIZE)
    pools = chain.engine.scheduler.pool, chain.engine.scheduler.holdings.snapshots
    for owner in (1, 2):
        chain.tell(KvQuery(1), owner=owner)
    chain.turn_until(lambda: replies(chain, 2))
    for owner in (1, 2):
        assert all(pool.changes is not None for pool in pools)
        chain.links.tell(owner, None)
        chain.turn_until(lambda: not chain.links.unread)
    assert all(pool.changes is None for pool in pools)


def test_a_follower_that_does_not_ask_keeps_nobody_waiting() -> None:
    links = MemoryLinks()
    pool = BlockPool(64, SIZE)
    followers = KvFollowers(links, (pool, SnapshotPool(0, 0, SIZE)), recorded=4)
    for owner in (1, 2):
        followers.ask(owner, 1)
        followers.answer()
    keys = PrefixKeys("")
    for place, block in enumerate(pool.allocate(20)):
        pool.make_findable(block, keys.content(place, bytes(4 * SIZE)))
        followers.ask(1, place + 2)
        followers.answer()
    told = [reply for owner, reply in links.sent if owner == 1 and isinstance(reply, KvReply)]
    assert len(told) == 21 and not any(reply.cleared for reply in told[1:]), "it has kept up"
    followers.ask(2, 2)
    followers.answer()
    (_, late) = [reply for owner, reply in links.sent if owner == 2 and isinstance(reply, KvReply)]
    assert late.cleared and len(late.changes) == 20 and late.is_whole
