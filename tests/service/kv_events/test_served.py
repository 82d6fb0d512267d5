"""A service with a real engine tells routers, over gRPC and over ZMQ, exactly the blocks that it counts as cached."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import grpc
import pytest
import zmq
import zmq.asyncio as zmq_asyncio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from benchmarks.local_service import local_service
from runahead.v1 import GenerateOnceRequest, GenerationServiceStub, StatsRequest
from tests.service.kv_events.test_replay import Subscriber
from tests.service.kv_events.zmq_readers import Router

TIMEOUT_S = 60.0


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def completed(channel: grpc.Channel, numbers: range) -> int:
    """Completions, of which some share a prefix; then how many blocks are cached when nobody holds one."""
    service = GenerationServiceStub(channel)
    for number in numbers:
        text = "def f(x):\n    return x\n" * (2 + number % 4) + str(number)
        stopping = {"max_tokens": 30, "ignore_eos": True}
        service.GenerateOnce(GenerateOnceRequest(text=text, stopping=stopping), timeout=TIMEOUT_S)
    while True:
        stats = service.Stats(StatsRequest(), timeout=TIMEOUT_S).stats
        if stats.blocks.free + stats.blocks.cached == stats.blocks.total:
            return int(stats.blocks.cached)


def read(channel: grpc.Channel, subscriber: Subscriber, cached: int) -> None:
    """What is new to the subscriber, until it has as many blocks as are cached."""
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=subscriber.read)
    call = vllm_engine_pb2_grpc.VllmEngineStub(channel).SubscribeKvEvents(request, timeout=TIMEOUT_S)
    for message in call:
        if not message.load.load_only:
            subscriber.take(message.SerializeToString())
        if message.load.load_only and len(subscriber.blocks) == cached:
            break
    call.cancel()


async def listened(ports: list[int], cached: int) -> Router:
    context = zmq_asyncio.Context()
    live = context.socket(zmq.SUB)
    live.subscribe(b"kv@")
    live.connect(f"tcp://127.0.0.1:{ports[0]}")
    router = Router("kv@replica-1@bundled", live, f"tcp://127.0.0.1:{ports[1]}", context)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while len(router.blocks) != cached:
                router.blocks.clear()
                await router.replay(0)
    finally:
        context.destroy(linger=0)
    return router


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture(scope="module")
def url(ports: list[int]) -> Iterator[str]:
    flags = ["--vllm-facade", "--kv-events", "--kv-events-port", str(ports[0])]
    flags += ["--kv-events-replay-port", str(ports[1]), "--kv-events-pod", "replica-1", "--served-name", "bundled"]
    flags += ["--threads", "1", "--max-rows", "4", "--num-blocks", "20", "--context-length", "128"]
    with local_service(flags) as service:
        yield service.url


@pytest.mark.timeout(240)
def test_both_streams_tell_what_is_cached(url: str, ports: list[int]) -> None:
    with grpc.insecure_channel(url) as channel:
        subscriber = Subscriber()
        read(channel, subscriber, completed(channel, range(4)))
        before = set(subscriber.blocks)
        cached = completed(channel, range(4, 16))
        read(channel, subscriber, cached)
        assert subscriber.snapshots == 1 and before - subscriber.blocks.keys(), "no block was removed: evict more"
        router = asyncio.run(listened(ports, cached))
    assert router.blocks == {number % (1 << 64) for number in subscriber.blocks}
