"""Time-outs do not count the time in which the process itself stood still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message

from runahead.service.calls.call import StreamWriter
from runahead.service.engine.pulse import running_timeout
from runahead.service.engine.request_stream import StalledReaderError
from runahead.v1 import GenerateResponse

LIMIT_S = 0.4
STOPPED_S = 1000.0
Stop = Callable[[], None]


def run(body: Callable[[Stop], Coroutine[Any, Any, None]]) -> None:
    """Runs `body(stop)`. Behind `stop()` the event loop's clock has gone on for long, as if it had been stopped."""

    async def begun() -> None:
        loop, stopped_s = asyncio.get_running_loop(), 0.0
        awake = loop.time

        def stop() -> None:
            nonlocal stopped_s
            stopped_s += STOPPED_S

        loop.time = lambda: awake() + stopped_s  # type: ignore[method-assign]
        await body(stop)

    asyncio.run(begun())


async def turns() -> None:
    """Whatever is due has run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_stop_of_the_process_counts_for_little_and_a_silence_in_full() -> None:
    async def body(stop: Stop) -> None:
        with pytest.raises(TimeoutError):
            async with running_timeout(LIMIT_S):
                for _ in range(3):
                    stop()
                    await turns()
                reached.append("behind the stops")
                await asyncio.Event().wait()

    reached: list[str] = []
    run(body)
    assert reached == ["behind the stops"]


def test_what_ends_in_time_has_no_time_out_later() -> None:
    async def body(stop: Stop) -> None:
        async with running_timeout(LIMIT_S):
            await asyncio.sleep(0)
        for _ in range(10):
            stop()
            await turns()

    run(body)


class Unread:
    """A call whose client reads its headers, and nothing else."""

    async def send_initial_metadata(self, headers: object) -> None:
        pass

    async def write(self, event: Message) -> None:
        await asyncio.Event().wait()


def test_a_stop_of_the_process_is_no_stalled_reader() -> None:
    async def body(stop: Stop) -> None:
        async def write() -> None:
            async with StreamWriter(cast(grpc.aio.ServicerContext[Any, Any], Unread()), LIMIT_S) as writer:
                await writer.begin()
                await writer.write(GenerateResponse())

        writing = asyncio.create_task(write())
        for _ in range(3):
            await turns()
            stop()
        await turns()
        assert not writing.done()
        with pytest.raises(StalledReaderError):
            await writing

    run(body)
