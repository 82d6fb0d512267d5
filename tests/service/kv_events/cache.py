"""A prefix cache that lives at random, and a front end that follows it by the engine's own messages."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import numpy as np

from runahead.runtime.engine.publisher import KvFollowers
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import SnapshotPool
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader
from runahead.runtime.wire.kv_events import KvQuery, KvReply
from runahead.runtime.wire.prompts import Content, PrefixKeys
from tests.runtime.chain import MemoryLinks
from tests.service.fake_engine import INFO

SIZE = 8
KV_INFO = msgspec.structs.replace(INFO, block_size=SIZE, layers=(m.LayerKind(2, "attention", 0, "dense"),))


class RandomCache:
    """Blocks of prompts of a few tokens, salted and not, come and go. snapshots: of states; 0: the model keeps none.

    recorded: changes that a follower may stay behind.
    """

    def __init__(self, seed: int, blocks: int = 120, snapshots: int = 0, recorded: int = 1 << 16) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(blocks + 1, SIZE)
        self.snapshots = SnapshotPool(snapshots, 2 if snapshots else 0, SIZE)
        self.links = MemoryLinks()
        self.followers = KvFollowers(self.links, (self.pool, self.snapshots), recorded)
        self.held: list[list[int]] = []
        self.events = 0  # so far, of the empty salt

    def step(self) -> None:
        """A prompt is computed, or one is given up, or a row's blocks are forgotten."""
        draw = self.random.random()
        if draw < 0.03:
            self.pool.forget(self.random.sample(range(1, self.pool.total + 1), 3))
        elif self.held and draw < 0.5:
            blocks = self.held.pop(self.random.randrange(len(self.held)))
            self.pool.fence(blocks)
            self.pool.release(blocks)
        else:
            self._compute()

    def _compute(self) -> None:
        count = self.random.randrange(1, 9)
        if count > self.pool.available:
            return
        blocks = self.pool.allocate(count)
        self.held.append(blocks)
        keys = PrefixKeys(self.random.choice(["", "", "", "salt"]))
        for place, block in enumerate(blocks):
            tokens = np.full(SIZE, self.random.randrange(3), np.int32).tobytes()
            content = keys.content(place, tokens)
            self.events += self.pool.make_findable(block, content) and content.unsalted
            if self.snapshots.ends_at_boundary(place) and self.snapshots.available and self.random.random() < 0.7:
                self._keep_state(content)

    def _keep_state(self, content: Content) -> None:
        taken = self.snapshots.allocate(1)
        self.snapshots.make_findable(taken[0], content)
        self.snapshots.fence(taken)
        self.snapshots.release(taken)

    def findable(self) -> dict[bytes, Content]:
        """What a prompt of the empty salt can begin with, by key, as the pools have it."""
        there = {content.key: content for content in self.pool.unsalted_contents(1, self.pool.total + 1)}
        if not self.snapshots.total:
            return there
        found: dict[bytes, Content] = {}
        for state in self.snapshots.unsalted_contents(1, self.snapshots.total + 1):
            at = there.get(state.key)
            while at is not None:
                found[at.key] = at
                at = there.get(at.before)
        return found


class CacheClient:
    """What a feed needs of an engine's client, with the messages as they cross the socket."""

    def __init__(self, cache: RandomCache, owner: int = 1, **info: Any) -> None:
        self.info = msgspec.structs.replace(KV_INFO, **info)
        self.owner = owner
        self._cache = cache
        self._call = 0

    async def kv_events(self) -> KvReply:
        self._call += 1
        question = FrameReader().feed(m.encode_frame(KvQuery(self._call)))[0]
        asked = m.decode_to_engine(question)
        assert isinstance(asked, KvQuery)
        self._cache.followers.ask(self.owner, asked.call)
        while True:
            self._cache.followers.answer()
            for at, (owner, message) in enumerate(self._cache.links.sent):
                if owner == self.owner:
                    del self._cache.links.sent[at]
                    reply = m.decode_to_front_end(FrameReader().feed(m.encode_frame(message))[0])
                    assert isinstance(reply, KvReply) and reply.call == self._call
                    return reply
            await asyncio.sleep(0)


async def told_all(cache: RandomCache, feed: asyncio.Task[None]) -> None:
    """Until the front end has been told of everything."""
    for _ in range(5):
        await asyncio.sleep(0)
    for _ in range(10_000):
        await asyncio.sleep(0)
        assert not feed.done()
        if not cache.followers.has_more and not cache.links.sent:
            return
    raise AssertionError("the front end is still being told")
