"""The connection to the engine: greeting, frames in any pieces, the end."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.validation import check_request
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError, RequestStream, SlowReaderError
from runahead.v1 import GenerateRequest, OutputOptions
from tests.service.fake_engine import INFO, FakeEngine

CHECKED = check_request(GenerateRequest(text="x"), INFO)
PROMPT = np.array([1, 2], np.int32)
DESCRIBED = check_request(GenerateRequest(text="x", output=OutputOptions(prompt_logprobs=0)), INFO)
LONG_PROMPT = np.array([1, 2, 3, 4], np.int32)


def part(offset: int, count: int) -> m.PromptLogprobs:
    """Log-probabilities of `count` prompt tokens of the first request."""
    return m.PromptLogprobs(1, offset, bytes(4 * count))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


def test_no_engine_is_a_sentence(path: Path) -> None:
    with pytest.raises(EngineLostError, match="could not be reached"):
        asyncio.run(SocketEngineClient.connect(path))


def test_an_engine_of_another_protocol_is_refused_with_both_numbers(path: Path) -> None:
    engine = FakeEngine(path, m.Welcome(m.PROTOCOL_VERSION + 1, "other", INFO))
    with pytest.raises(EngineLostError, match=f"protocol {m.PROTOCOL_VERSION + 1}.* {m.PROTOCOL_VERSION}"):
        asyncio.run(SocketEngineClient.connect(path))
    engine.close()


def test_an_engine_that_does_not_answer_is_given_up(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(EngineLostError, match="did not answer"):
            asyncio.run(SocketEngineClient.connect(path, timeout_s=0.05))


def test_tokens_of_several_launches_are_taken_at_once_with_the_end(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        stream = client.submit(CHECKED, PROMPT)
        await stream.accepted()
        for token in (7, 8):
            engine.output(stream.handle, [token])
        engine.output(stream.handle, [9], FinishReason.LENGTH)
        taken = []
        while (batch := await stream.take()).finished is None:
            taken += batch.token_ids
        assert taken + batch.token_ids == [7, 8, 9]
        client.release(stream)
        await client.stats()  # answered after all that was sent before
        assert engine.cancelled.empty(), "an ended request is not cancelled"

    run(path, body)


@pytest.mark.parametrize("border", [1 << 31, 1 << 32])
def test_handles_and_calls_are_counted_across_a_border(path: Path, border: int) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        for handle in (border - 1, border, border + 1):
            stream = client.submit(CHECKED, PROMPT)
            assert stream.handle == engine.next_submit().handle == handle
            await stream.accepted()
            engine.output(handle, [handle % 1000], FinishReason.LENGTH)
            batch = await stream.take()
            assert (batch.token_ids, batch.finished is None) == (
                [handle % 1000],
                False,
            )
            assert (await client.abort(("nobody",), False)).call == 2 * handle - border + 1
            await client.stats()
            client.release(stream)

    run(path, body, counters_from=border - 2)


def test_the_engine_is_told_when_a_request_was_submitted(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        before = time.monotonic()
        stream = client.submit(CHECKED, PROMPT)
        after = time.monotonic()
        submitted_at = engine.next_submit().submitted_at
        assert submitted_at is not None
        assert before <= submitted_at <= after
        client.release(stream)

    run(path, body)


def test_a_released_stream_is_cancelled_once(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        stream = client.submit(CHECKED, PROMPT)
        client.release(stream)
        client.release(stream)
        engine.output(stream.handle, [1])  # a late token is nobody's
        await client.stats()
        assert engine.next_cancel() == stream.handle
        assert engine.cancelled.empty()

    run(path, body)


def test_frames_arrive_in_any_pieces(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        stream = client.submit(CHECKED, PROMPT)
        await stream.accepted()
        handles, tokens = np.array([stream.handle], "<i8").tobytes(), np.array([5], "<i4").tobytes()
        frame = m.encode_frame(m.Output(1, handles, tokens))
        for byte in frame[:-1]:
            client.data_received(bytes([byte]))
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        client.data_received(frame[-1:])
        assert (await waiting).token_ids == [5]
        client.release(stream)

    run(path, body)


def test_everything_that_waits_ends_when_the_engine_is_lost(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        engine.auto_accept = False
        waiting = client.submit(CHECKED, PROMPT).accepted()
        streaming = client.submit(CHECKED, PROMPT).take()
        lost = client.wait_lost()
        results = asyncio.gather(waiting, streaming, lost, return_exceptions=True)
        await asyncio.sleep(0)
        engine.die()
        assert [type(result) for result in await results] == [EngineLostError] * 3
        for call in (client.stats(), client.abort((), True)):
            with pytest.raises(EngineLostError):
                await call
        with pytest.raises(EngineLostError):
            client.submit(CHECKED, PROMPT)

    run(path, body)


@pytest.mark.parametrize(
    ("handles", "tokens"), [(8, 0), (0, 4), (8, 8), (4, 4), (9, 4), (8, 3), (16, 9)], ids=lambda size: f"{size} bytes"
)
def test_columns_of_different_lengths_are_a_broken_protocol(path: Path, handles: int, tokens: int) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        engine.send(m.Output(1, bytes(handles), bytes(tokens)))
        assert (await client.wait_lost()).reason == "PROTOCOL"

    run(path, body)


def test_log_probabilities_of_the_prompt_are_taken_message_by_message_before_the_tokens(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        stream = client.submit(DESCRIBED, LONG_PROMPT)
        engine.prompt_logprobs(stream.handle, 1, [-1.0, -2.0])
        engine.prompt_logprobs(stream.handle, 3, [-3.0])
        engine.send(m.Admitted(stream.handle, 0, 0.5))
        engine.output(stream.handle, [9], FinishReason.LENGTH)
        parts = []
        while (part := await stream.take_prompt()) is not None:
            parts.append(part.offset)
        assert parts == [1, 3]
        batch = await stream.take()
        assert batch.token_ids == [9]
        assert batch.admitted == m.Admitted(stream.handle, 0, 0.5)

    run(path, body)


@pytest.mark.parametrize(
    "parts",
    [
        [part(2, 1)],
        [part(1, 1), part(1, 1)],
        [part(1, 1), part(3, 1)],
        [part(1, 4)],
        [part(1, 0)],
        [m.PromptLogprobs(1, 1, bytes(6))],
        [m.PromptLogprobs(1, 1, bytes(8), bytes(12), bytes(12))],
        [m.PromptLogprobs(1, 1, bytes(8), bytes(16), bytes(8))],
        [part(1, 2), m.Output(1, b"\1\0\0\0", b"\7\0\0\0")],
    ],
    ids=[
        "a gap at the start",
        "twice",
        "a gap",
        "too many",
        "none",
        "a cut column",
        "uneven tops",
        "no values",
        "early",
    ],
)
def test_prompt_log_probabilities_that_are_not_the_next_ones_are_a_broken_protocol(
    path: Path, parts: list[m.ToFrontEnd]
) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        stream = client.submit(DESCRIBED, LONG_PROMPT)
        assert stream.handle == 1
        await stream.accepted()
        for message in parts:
            engine.send(message)
        assert (await client.wait_lost()).reason == "PROTOCOL"

    run(path, body)


def test_prompt_log_probabilities_that_nobody_asked_for_are_a_broken_protocol(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        await client.submit(CHECKED, LONG_PROMPT).accepted()
        engine.send(part(1, 1))
        assert (await client.wait_lost()).reason == "PROTOCOL"

    run(path, body)


def test_what_the_engine_still_says_of_a_released_stream_is_nobodys(path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        stream = client.submit(DESCRIBED, LONG_PROMPT)
        await stream.accepted()
        client.release(stream)
        engine.send(m.Admitted(stream.handle, 0, 0.5))
        engine.send(part(3, 1))
        await client.stats()
        assert engine.next_cancel() == stream.handle
        assert engine.cancelled.empty()

    run(path, body)


def test_a_request_that_ends_before_its_prompt_is_described_has_no_more_of_it() -> None:
    async def body() -> None:
        stream = RequestStream(1, 1000, unread_prompt_bytes=1000)
        stream.expect_prompt(3)
        assert stream.push_prompt(part(1, 1))
        stream.finish(m.Finished(1, FinishReason.ABORTED))
        first = await stream.take_prompt()
        assert first is not None and first.offset == 1
        assert await stream.take_prompt() is None
        assert (await stream.take()).finished is not None

    asyncio.run(body())


def test_a_buffer_of_the_prompt_over_its_bound_fails_its_stream_and_drops_what_it_holds() -> None:
    async def body() -> None:
        stream, interrupted = RequestStream(1, 1000, unread_prompt_bytes=160), asyncio.Event()
        stream.expect_prompt(60)
        stream.interrupt_with(interrupted.set)
        assert stream.push_prompt(part(1, 20)) and stream.push_prompt(part(21, 20))
        assert not interrupted.is_set()
        assert not stream.push_prompt(part(41, 20))
        assert interrupted.is_set()
        with pytest.raises(SlowReaderError):
            await stream.take_prompt()

    asyncio.run(body())


def test_a_prompt_that_is_read_never_fills_its_buffer() -> None:
    async def body() -> None:
        stream = RequestStream(1, 1000, unread_prompt_bytes=160)
        stream.expect_prompt(200)
        assert stream.push_prompt(part(1, 20))
        for place in range(21, 201, 20):  # one message is always unread when the next arrives
            assert stream.push_prompt(part(place, 20))
            taken = await stream.take_prompt()
            assert taken is not None and taken.offset == place - 20

    asyncio.run(body())


def test_one_message_of_the_prompt_always_has_room() -> None:
    async def body() -> None:
        stream = RequestStream(1, 1000, unread_prompt_bytes=1)
        stream.expect_prompt(40)
        for place in (1, 21):
            assert stream.push_prompt(part(place, 20))
            assert await stream.take_prompt() is not None
        assert await stream.take_prompt() is None

    asyncio.run(body())


def test_a_buffer_over_its_bound_fails_its_stream_and_drops_the_tokens() -> None:
    async def body() -> None:
        stream, interrupted = RequestStream(1, unread_bytes=100), asyncio.Event()
        stream.interrupt_with(interrupted.set)
        assert stream.push(1, None) and stream.push(2, None)
        assert not stream.push(3, None)
        assert interrupted.is_set()
        with pytest.raises(SlowReaderError):
            await stream.take()

    asyncio.run(body())


def test_a_buffer_that_is_read_never_fills() -> None:
    async def body() -> None:
        stream = RequestStream(1, unread_bytes=100)
        for token in range(100):
            assert stream.push(token, None)
            assert len((await stream.take()).token_ids) == 1

    asyncio.run(body())


def run(path: Path, body, counters_from: int = 0) -> None:  # type: ignore[no-untyped-def]
    """Runs `body(client, engine)` with a connected client."""

    async def connected() -> None:
        client = await SocketEngineClient.connect(path, counters_from=counters_from)
        try:
            async with asyncio.timeout(10):
                await body(client, engine)
        finally:
            client.close("SHUTDOWN", "the test is over")
            await asyncio.sleep(0)  # the transport closes on the loop's next turn

    engine = FakeEngine(path)
    try:
        asyncio.run(connected())
    finally:
        engine.close()
