"""Streams of one client process. It imports neither torch nor the engine, so that eight of them begin soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from benchmarks.gpu_table.errors import BenchmarkError
from runahead.v1 import GenerateRequest, GenerationServiceStub
from runahead.v1.generate_pb2 import FINISH_REASON_LENGTH


class Streamed(NamedTuple):
    """By one client. ended_at: seconds on the clock that all processes share. in_time: it began when it was told to."""

    ended_at: float
    tokens: int
    messages: int
    in_time: bool


def client(url: str, requests: Sequence[bytes], begin_at: float) -> Streamed:
    """Run the requests at once from `begin_at` on, one stream each; none of them where that moment has passed.

    Raises BenchmarkError for a stream that ends early.
    """
    return asyncio.run(_client(url, requests, begin_at))


async def _client(url: str, requests: Sequence[bytes], begin_at: float) -> Streamed:
    async with grpc.aio.insecure_channel(url) as channel:
        await channel.channel_ready()
        stub = GenerationServiceStub(channel)
        parsed = [GenerateRequest.FromString(request) for request in requests]
        wait_s = begin_at - time.monotonic()
        if wait_s <= 0:
            return Streamed(begin_at, 0, 0, in_time=False)
        await asyncio.sleep(wait_s)
        counts = await asyncio.gather(*(_stream(stub, request) for request in parsed))
        ended_at = time.monotonic()
        return Streamed(ended_at, sum(tokens for tokens, _ in counts), sum(sent for _, sent in counts), in_time=True)


async def _stream(stub: GenerationServiceStub, request: GenerateRequest) -> tuple[int, int]:
    """Tokens, and messages that brought some."""
    tokens = messages = 0
    reason = None
    async for response in stub.Generate(request):
        event = response.WhichOneof("event")
        if event == "delta":
            tokens += len(response.delta.tokens)
            messages += 1
        elif event == "finished":
            reason = response.finished.reason
    if reason != FINISH_REASON_LENGTH or tokens != request.stopping.max_tokens:
        raise BenchmarkError(f"a stream brought {tokens} tokens of {request.stopping.max_tokens}, reason {reason}")
    return tokens, messages
