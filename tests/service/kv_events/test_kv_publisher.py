"""The ZMQ stream is what llm-d and Dynamo read, and whoever asks for its past gets all that is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio as zmq_asyncio

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.prompts import PrefixKeys
from runahead.service.kv_events.feed import Cleared, Event, KvFeed, KvMirror, Removed, Stored
from runahead.service.servers.kv_publisher import KvPublisher, block_hash, payload, topic
from runahead.service.settings.settings import NO_PORT
from tests.service.kv_events.cache import KV_INFO, SIZE, CacheClient, RandomCache, told_all
from tests.service.kv_events.zmq_readers import Router, dynamo, llm_d

HOST = "127.0.0.1"
TOPIC = topic("pod-1", "fake")
# [1.5, [AllBlocksCleared, BlockStored of two blocks, BlockStored behind the first, BlockRemoved], 0]
RECORDED = (
    "93cb3ff80000000000009491b0416c6c426c6f636b73436c65617265649cab426c6f636b53746f72656492cf1f46f841cb89"
    "836fcf23b684237bc40826c0dc00100101010101010101020202020202020208c0a3475055c0c000ae66756c6c5f61747465"
    "6e74696f6ec09cab426c6f636b53746f72656491cf3fd1e1e3a54cfa96cf1f46f841cb89836f98cd012ccd012ccd012ccd01"
    "2ccd012ccd012ccd012ccd012c08c0a3475055c0c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76"
    "656491cf23b684237bc40826a34750550000"
)


def blocks(*runs: list[int]) -> list[Stored]:
    """Blocks that follow each other from the beginning of a prompt, each of one token again and again."""
    found = []
    for run in runs:
        keys = PrefixKeys("")
        for place, token in enumerate(run):
            content = keys.content(place, np.full(SIZE, token, np.int32).tobytes())
            found.append(Stored(content.key, content.before, content.tokens))
    return found


def events() -> list[Event]:
    first, second, _, other = blocks([1, 2], [1, 300])
    return [Cleared(), first, second, other, Removed(second.key)]


def test_a_batch_is_the_recorded_bytes() -> None:
    assert payload(events(), KV_INFO, 1.5).hex() == RECORDED


def test_llm_d_reads_it() -> None:
    first, second, _, other = (block_hash(block.key) for block in blocks([1, 2], [1, 300]))
    assert llm_d(payload(events(), KV_INFO, 1.5)) == [
        ("AllBlocksCleared",),
        ("BlockStored", [first, second], 0, [1] * SIZE + [2] * SIZE, "gpu", 0, "full_attention", None),
        ("BlockStored", [other], first, [300] * SIZE, "gpu", 0, "full_attention", None),
        ("BlockRemoved", [second], "gpu", 0),
    ]


def test_dynamo_reads_it() -> None:
    first, second, _, other = (block_hash(block.key) for block in blocks([1, 2], [1, 300]))
    assert dynamo(payload(events(), KV_INFO, 1.5)) == [
        ("AllBlocksCleared", []),
        ("BlockStored", [first, second]),
        ("BlockStored", [other]),
        ("BlockRemoved", [second]),
    ]


@pytest.mark.parametrize(("windows", "expected"), [((24, 24), 24), ((24, 0), None), ((0, 0), None)])
def test_a_window_is_told_where_every_layer_has_it(windows: tuple[int, int], expected: int | None) -> None:
    layers = tuple(m.LayerKind(1, "attention", window, "dense") for window in windows)
    info = msgspec.structs.replace(KV_INFO, layers=(*layers, m.LayerKind(1, "mamba2", 0, "dense")))
    ((*_, window),) = llm_d(payload(blocks([1]), info, 0.0))
    assert window == expected


@asynccontextmanager
async def publishing(cache: RandomCache, most_batches: int = 10_000) -> AsyncIterator[tuple[KvPublisher, Router]]:
    """A publisher that follows the cache, and a router that reads what comes later; ended with the body."""
    publisher = KvPublisher(TOPIC, KV_INFO, HOST, 0, 0, most_batches=most_batches)
    feed = asyncio.create_task(KvFeed(CacheClient(cache), publisher, pace_s=0).run())  # type: ignore[arg-type]
    context = zmq_asyncio.Context()
    try:
        await told_all(cache, feed)
        live = context.socket(zmq.SUB)
        live.subscribe(b"kv@")
        live.connect(f"tcp://{HOST}:{publisher.port}")
        yield publisher, Router(TOPIC.decode(), live, f"tcp://{HOST}:{publisher.replay_port}", context)
    finally:
        feed.cancel()
        context.destroy(linger=0)
        publisher.close()


def follows(most_batches: int) -> Router:
    """A router that joins late, reads now and then, and in the end has what is cached."""
    cache = RandomCache(5)
    for _ in range(100):
        cache.step()

    async def follow() -> Router:
        async with publishing(cache, most_batches) as (_, router), asyncio.timeout(60):
            for turn in range(400):
                cache.step()
                await asyncio.sleep(0.001)
                if turn % 50 > 25:
                    while await router.live.poll(0):
                        await router.read()
            while router.blocks != {block_hash(key) for key in cache.findable()} or not cache.held:
                cache.step()
                while not await router.live.poll(10):
                    cache.step()
                while await router.live.poll(50):
                    await router.read()
            return router

    return asyncio.run(follow())


def test_a_router_that_joins_late_asks_for_the_past_and_has_what_is_cached() -> None:
    router = follows(10_000)
    assert router.replays and not router.resets


def test_numbers_begin_again_with_everything_that_is_there() -> None:
    router = follows(20)
    assert router.resets


def test_a_question_that_is_none_is_passed_over() -> None:
    async def ask() -> None:
        async with publishing(RandomCache(6)) as (publisher, router), asyncio.timeout(30):
            dealer = router.context.socket(zmq.DEALER)
            dealer.connect(router.replay_url)
            for parts in ([b""], [b"", b"123"], [b"", b"12345678", b""]):
                await dealer.send_multipart(parts)
            await router.replay(0)
            assert router.last == 0 and not await dealer.poll(0)
            assert publisher.replay_port != publisher.port

    asyncio.run(ask())


def test_a_port_that_is_taken_is_refused() -> None:
    async def bind_twice() -> None:
        first = KvPublisher(TOPIC, KV_INFO, HOST, 0, NO_PORT)
        with pytest.raises(ConfigError, match=f"published on {HOST} port {first.port}: Address already in use"):
            KvPublisher(TOPIC, KV_INFO, HOST, first.port, NO_PORT)
        first.close()

    asyncio.run(bind_twice())


def test_what_is_sent_is_bounded_in_bytes_until_numbers_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.service.servers.kv_publisher._MOST_BYTES", 1000)

    async def send() -> Iterator[int]:
        publisher = KvPublisher(TOPIC, KV_INFO, HOST, 0, NO_PORT)
        publisher.begin(KvMirror(needs_snapshots=False))
        kept = []
        for _ in range(40):
            publisher.add(blocks([1]))
            kept.append(sum(map(len, publisher._sent)))
        publisher.close()
        return iter(kept)

    kept = list(asyncio.run(send()))
    assert max(kept) < 1100 and min(kept[10:]) < 100
