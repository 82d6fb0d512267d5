"""A launch's tokens for many streams: their readers are woken in turns, and what else comes is dealt with between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import numpy as np

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.limits import LIMITS
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import READERS_A_TURN, EngineLostError, RequestStream, TokenBatch, Waking

STREAMS = 10 * READERS_A_TURN
MOST_A_TURN = 2 * READERS_A_TURN  # of those that are woken in one turn, and run in the next


class Readers:
    """Of so many streams, each of which waits for tokens. took: in order, whose reader has what."""

    def __init__(self) -> None:
        self.client = SocketEngineClient()
        self.took: list[tuple[int, TokenBatch]] = []
        self.streams: list[RequestStream] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def wait(self, count: int = STREAMS) -> None:
        """Opens them, and returns when all wait."""
        for _ in range(count):
            self.streams.append(self.client._new_stream())
            self._tasks.append(asyncio.create_task(self._read(self.streams[-1])))
        await asyncio.sleep(0)

    def launch(self, token: int) -> None:
        """A token for every stream has come, by one message."""
        handles = np.array([stream.handle for stream in self.streams], "<i8")
        tokens = np.full(len(self.streams), token, "<i4")
        self.client.data_received(m.encode_frame(m.Output(1, handles.tobytes(), tokens.tobytes())))

    async def all_taken(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _read(self, stream: RequestStream) -> None:
        self.took.append((stream.handle, await stream.take()))


def run(body: Callable[[Readers], Awaitable[None]]) -> None:
    async def started() -> None:
        readers = Readers()
        try:
            await body(readers)
        finally:
            readers.client.close("SHUTDOWN", "the test is over")

    asyncio.run(started())


def test_the_readers_of_a_launch_are_woken_in_its_order_and_a_few_in_each_turn_of_the_loop() -> None:
    async def body(readers: Readers) -> None:
        await readers.wait()
        readers.launch(7)
        seen = [0]
        while seen[-1] < STREAMS:
            await asyncio.sleep(0)  # a turn
            seen.append(len(readers.took))
        assert max(np.diff(seen)) <= READERS_A_TURN
        assert [handle for handle, _ in readers.took] == [stream.handle for stream in readers.streams]

    run(body)


def test_what_comes_to_a_socket_while_a_launch_is_handed_over_waits_for_a_few_streams_alone() -> None:
    async def body(readers: Readers) -> None:
        await readers.wait()
        ours, theirs = socket.socketpair()
        taken_before: list[int] = []
        with ours, theirs:
            asyncio.get_running_loop().add_reader(
                ours, lambda: taken_before.append(len(readers.took)) if ours.recv(1) else None
            )
            readers.launch(7)
            await asyncio.sleep(0)  # the first of them are woken, and run next
            theirs.send(b"x")
            await readers.all_taken()
            asyncio.get_running_loop().remove_reader(ours)
        assert len(taken_before) == 1
        assert taken_before[0] <= MOST_A_TURN < STREAMS

    run(body)


def test_a_stream_that_waits_for_its_turn_has_all_that_came_meanwhile_and_is_woken_once() -> None:
    async def body(readers: Readers) -> None:
        await readers.wait()
        for token in (7, 8):
            readers.launch(token)
        await readers.all_taken()
        assert [batch.token_ids for _, batch in readers.took] == [[7, 8]] * STREAMS
        assert not any(stream.has_more for stream in readers.streams)

    run(body)


def test_an_end_waits_for_no_turn() -> None:
    async def body(readers: Readers) -> None:
        await readers.wait()
        last = readers.streams[-1]
        readers.launch(7)
        last.finish(m.Finished(last.handle, int(FinishReason.LENGTH), -1, 0, 0.0, 0.0, 0.0, 0.0))
        await readers.all_taken()
        handle, batch = readers.took[0]
        assert (handle, batch.token_ids, batch.finished is not None) == (last.handle, [7], True)

    run(body)


def test_a_failure_reaches_a_reader_that_waits_for_its_turn_as_a_failure_and_not_as_an_interrupt() -> None:
    async def body() -> None:
        waking, interrupts = Waking(), []
        stream = RequestStream(1, LIMITS.unread_bytes, schedule_wake=waking.add)
        stream.interrupt_with(lambda: interrupts.append(1))
        taking = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.push(7, None)
        stream.fail(EngineLostError("ENGINE_LOST", "it is gone"))
        await asyncio.wait([taking])
        assert isinstance(taking.exception(), EngineLostError)
        assert interrupts == []

    asyncio.run(body())
