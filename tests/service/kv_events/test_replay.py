"""A recorded stream rebuilds exactly what the prefix cache holds after 10,000 random events.

The subscriber is stopped and resumed in between.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from runahead.service.kv_events.feed import Batch, Cleared, Event, KvFeed, KvHistory, KvMirror
from runahead.service.servicers.vllm_kv_events import batch_message, block_hash
from tests.service.kv_events.cache import CacheClient, RandomCache, told_all

EVENTS = 10_000


@dataclass
class Subscriber:
    """Reads recorded messages as a router does: by number, a snapshot as a new beginning. snapshots, resumed: how often
    it began anew, and how often it went on behind a batch."""

    blocks: dict[int, int | None] = field(default_factory=dict)  # the parent, by hash
    read: int = 0
    snapshots: int = 0
    resumed: int = 0

    def take(self, record: bytes) -> None:
        message = common_pb2.KvEventBatch.FromString(record)
        is_snapshot = message.HasField("snapshot")
        if is_snapshot and not message.snapshot.index:
            assert message.events[0].HasField("cleared"), "chunk 0 clears"
            self.snapshots += 1
            self.left = message.snapshot.count
        if is_snapshot:
            self.left -= 1
            assert self.left == message.snapshot.count - message.snapshot.index - 1
        else:
            assert message.sequence_number == self.read + 1, "a gap"
        self.read = message.sequence_number
        for event in message.events:
            self._apply(event)
        if is_snapshot and not self.left:
            assert len(self.blocks) == message.snapshot.blocks
            order = list(self.blocks)
            for place, (_, parent) in enumerate(self.blocks.items()):
                assert parent not in self.blocks or order.index(parent) < place, "parents before children"

    def _apply(self, event: Any) -> None:
        match event.WhichOneof("data"):
            case "stored":
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    assert block.block_hash not in self.blocks, "stored twice"
                    self.blocks[block.block_hash] = parent
                    parent = block.block_hash
            case "removed":
                for removed in event.removed.block_hashes:
                    del self.blocks[removed]
            case _:
                self.blocks.clear()


class Witness:
    """A sink in front of a history, which counts how often everything was cleared."""

    def __init__(self, history: KvHistory) -> None:
        self.history = history
        self.clears = 0

    def begin(self, mirror: KvMirror) -> None:
        self.history.begin(mirror)

    def add(self, events: list[Event]) -> None:
        self.clears += sum(isinstance(event, Cleared) for event in events)
        self.history.add(events)


def test_a_recorded_stream_rebuilds_what_is_cached() -> None:
    rebuilds(RandomCache(1), {}, clears=False)


def test_a_front_end_that_stays_behind_begins_anew() -> None:
    rebuilds(RandomCache(2, recorded=40), {}, clears=True)


@pytest.mark.parametrize("seed", [3, 4])
def test_of_a_model_with_states_only_blocks_with_a_snapshot_are_told(seed: int) -> None:
    rebuilds(RandomCache(seed, snapshots=12), {"state_bytes": 64}, clears=False)


def rebuilds(cache: RandomCache, info: dict[str, Any], clears: bool) -> None:
    chance = random.Random(cache.random.random())

    async def follow() -> None:
        for _ in range(50):
            cache.step()  # what is there before anybody follows
        client, history = CacheClient(cache, **info), KvHistory(kept=300)
        witness = Witness(history)
        feed = asyncio.create_task(KvFeed(client, witness, pace_s=0).run())  # type: ignore[arg-type]
        await told_all(cache, feed)
        subscriber, record, is_there, begun = Subscriber(), list[bytes](), True, cache.events
        ids = itertools.count(1)

        def read() -> None:
            for batch in history.behind(subscriber.read):
                record.append(batch_message(batch, client.info, ids).SerializeToString())
            before = subscriber.snapshots
            for one in record:
                subscriber.take(one)
            subscriber.resumed += bool(record) and subscriber.snapshots == before
            record.clear()

        while cache.events < begun + EVENTS:
            for _ in range(chance.choice([1, 5, 60])):
                cache.step()
            if chance.random() < 0.05:
                is_there = not is_there
            await told_all(cache, feed)
            if is_there:
                read()
        read()
        expected = cache.findable()
        assert subscriber.blocks.keys() == {block_hash(key) for key in expected} and len(expected) > 10
        assert subscriber.snapshots > 2 and subscriber.resumed > 2, "it was never away for long, or never for short"
        assert bool(witness.clears) == clears
        feed.cancel()

    asyncio.run(follow())


def test_a_number_of_another_process_is_none_of_these() -> None:
    history = KvHistory(begin=100)
    history.begin(KvMirror(needs_snapshots=False))
    history.add([Cleared()])
    history.add([Cleared()])
    assert [batch.number for batch in history.behind(100)] == [101, 102] and history.behind(102) == []
    for other in (0, 99, 103):
        (part,) = history.behind(other)
        assert (part.part, part.parts, part.number) == (0, 1, 102), "all blocks, at the newest batch's number"


def test_histories_begin_at_numbers_of_their_own() -> None:
    assert len({first_of(KvHistory()).number for _ in range(4)}) == 4


def first_of(history: KvHistory) -> Batch:
    history.begin(KvMirror(needs_snapshots=False))
    return history.behind(0)[0]
