"""Readers of the ZMQ stream, as others' programs read it: what each needs of a message, and when it asks for the past.

llm-d-router at ebab6879 and llm-d-kv-cache-manager at a378f5b3: topics, numbers, fields by place, replay. Dynamo's
`zmq_wire`: three fields of a batch, hashes as 64-bit numbers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio as zmq_asyncio


def llm_d(body: bytes) -> list[tuple[Any, ...]]:
    """Events: a tag, and fields by place, of which some may be missing at the end. Raises where it would not parse."""
    _, events, *rank = msgspec.msgpack.decode(body)
    assert not rank or isinstance(rank[0], int)
    found: list[tuple[Any, ...]] = []
    for event in events:
        tag, *fields = event
        if tag == "BlockStored":
            hashes, parent, ids, size = fields[:4]
            lora, medium, lora_name, extra, group, kind, window = (fields[4:] + [None] * 7)[:7]
            assert all(_is_uint64(one) for one in hashes) and (parent is None or _is_uint64(parent))
            assert len(ids) == size * len(hashes) and all(isinstance(one, int) and one >= 0 for one in ids)
            assert (lora, lora_name, extra) == (None, None, None) and isinstance(medium, str)
            assert isinstance(group, int) and isinstance(kind, str) and (window is None or isinstance(window, int))
            found.append((tag, hashes, parent or 0, ids, medium.lower(), group, kind, window))
        elif tag == "BlockRemoved":
            hashes, medium, group = (fields + [None] * 2)[:3]
            assert all(_is_uint64(one) for one in hashes)
            found.append((tag, hashes, medium.lower(), group))
        else:
            assert (tag, fields) == ("AllBlocksCleared", [])
            found.append((tag,))
    return found


class DynamoBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Exactly three fields."""

    ts: float
    events: list[list[Any]]
    data_parallel_rank: int | None


def dynamo(body: bytes) -> list[tuple[str, list[int]]]:
    """Events with their hashes, which older versions read as numbers alone."""
    batch = msgspec.msgpack.decode(body, type=DynamoBatch)
    return [(event[0], msgspec.convert(event[1], list[int]) if event[1:] else []) for event in batch.events]


def _is_uint64(number: object) -> bool:
    return isinstance(number, int) and 0 <= number < 1 << 64


@dataclass
class Router:
    """llm-d's subscriber with a replay endpoint: what it has of one pod, and how often it asked for the past."""

    topic: str
    live: zmq_asyncio.Socket
    replay_url: str
    context: zmq_asyncio.Context
    blocks: set[int] = field(default_factory=set)
    last: int | None = None
    last_live: int | None = None
    replays: int = 0
    resets: int = 0

    async def read(self) -> None:
        """The next live message, and what it makes it ask for."""
        topic, number, body = await self.live.recv_multipart()
        assert topic.decode().split("@") == self.topic.split("@") and len(topic.decode().split("@")) == 3
        seq = int.from_bytes(number, "big")
        if self.last_live is not None and seq < self.last_live:
            self.resets += 1
            self.blocks.clear()
            self.last = None
            await self.replay(0)
        if seq == self.last_live:
            return
        self.last_live = seq
        if self.last is not None and seq <= self.last:
            return
        if self.last is not None and seq > self.last + 1:
            await self.replay(self.last + 1)
        elif self.last is None and seq > 0:
            await self.replay(0)
        if seq == (0 if self.last is None else self.last + 1):
            self.apply(body)
            self.last = seq

    async def replay(self, first: int) -> None:
        """Every batch from this one on, without a gap."""
        self.replays += 1
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.replay_url)
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        expected = first
        async with asyncio.timeout(10):
            while True:
                empty, topic, number, body = await dealer.recv_multipart()
                assert empty == b""
                if not body:
                    break
                assert (topic.decode(), int.from_bytes(number, "big")) == (self.topic, expected)
                self.apply(body)
                self.last = expected
                expected += 1
        dealer.close()

    def apply(self, body: bytes) -> None:
        for tag, *fields in llm_d(body):
            if tag == "BlockStored":
                self.blocks.update(fields[0])
            elif tag == "BlockRemoved":
                self.blocks.difference_update(fields[0])
            else:
                self.blocks.clear()
