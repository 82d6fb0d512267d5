"""Streams whose readers lag or stop: tokens go into fewer messages, and what does not move at all is ended."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.completion.completion import Completion
from runahead.service.completion.preparing import OpenCompletion
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import check_request
from runahead.service.engine.request_stream import RequestStream
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.text.text import token_bytes
from runahead.v1 import Delta, GenerateRequest, GenerateResponse, OutputOptions, StatsRequest, StoppingOptions
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.raw_http2 import ACK, MAX_WINDOW, SETTINGS, RawClient
from tests.service.running_service import Service
from tests.service.small_tokenizers import byte_level_tokenizer

RESOURCE_EXHAUSTED = b"grpc-status\x018"
OK = b"grpc-status\x010"
SHORT_S = 0.2  # long enough that a reader who does read is not taken for one who does not


@contextmanager
def served(folder: Path, stalled_stream_s: float = 60.0) -> Iterator[Service]:
    path = folder / "engine.sock"
    settings = FrontEndSettings(stalled_stream_s=stalled_stream_s)
    with Service(FakeEngine(path), path, settings=settings) as running:
        yield running


def begin(client: RawClient, service: Service, **output: Any) -> tuple[int, int]:
    """A completion on this connection. Returns its stream and its handle in the engine."""
    stream = client.begin("Generate")
    request = GenerateRequest(text="x", request_id="mine", output=OutputOptions(**output))
    client.message(stream, request.SerializeToString(), ends=True)
    return stream, service.engine.next_submit().handle


def sync(service: Service) -> None:
    """Returns when the front end has heard all that the engine has said."""
    service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S)


def events(data: list[bytes]) -> list[GenerateResponse]:
    return [GenerateResponse.FromString(message) for message in data]


def wait_for(service: Service, is_so: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if is_so():
            return
        sync(service)
    raise AssertionError("it did not come about")


# ------------------------------------------------------------ one message for what has come since the last


def test_all_tokens_that_came_while_a_stream_was_not_read_are_one_message(service: Service) -> None:
    with RawClient(service.port, window=0) as client:
        stream, handle = begin(client, service)
        for token in range(50):
            service.engine.output(handle, [token])
        sync(service)
        client.grant(stream, MAX_WINDOW)
        accepted, delta = events(client.messages_of(stream, 2))
        assert accepted.HasField("accepted")
        assert [token.id for token in delta.delta.tokens] == list(range(50))
        service.engine.output(handle, [50])
        (delta,) = events(client.messages_of(stream, 1))
        assert [token.id for token in delta.delta.tokens] == [50], "a stream that keeps up has a token a message"


def completion(**output: Any) -> Completion:
    tokenizer = byte_level_tokenizer()
    request = GenerateRequest(text="x", output=OutputOptions(**output), stopping=StoppingOptions(max_tokens=1000))
    return Completion(check_request(request, INFO, has_tokenizer=True), 1, token_bytes(tokenizer, set()), 0.0)


def taken(stream: RequestStream, of: Completion) -> list[Delta]:
    """What a writer that never waits makes of all that is there."""

    async def body() -> list[Delta]:
        opened = OpenCompletion(Any, stream, Any, [of], Any)  # type: ignore[arg-type]
        deltas = []
        while stream.has_more or not of.is_empty:
            event = await opened.next_event()
            assert event is not None
            deltas.append(event.delta)
        return deltas

    return asyncio.run(body())


def test_what_a_message_had_no_room_for_goes_with_what_comes_next() -> None:
    made, stream = completion(max_tokens_per_message=4), RequestStream(1, LIMITS.unread_bytes)

    async def body() -> list[int]:
        opened = OpenCompletion(Any, stream, Any, [made], Any)  # type: ignore[arg-type]
        sizes = []
        for arrived in (6, 3, 0, 1):
            for token in range(arrived):
                stream.push(token, None)
            event = await opened.next_event()
            assert event is not None
            sizes.append(len(event.delta.tokens))
        return sizes

    assert asyncio.run(body()) == [4, 4, 1, 1]


def test_a_message_has_as_many_tokens_as_fit_its_bytes() -> None:
    made, stream = completion(logprobs=20), RequestStream(1, LIMITS.unread_bytes)
    top = tuple(range(20)), tuple(-float(i) for i in range(20))
    for index in range(350):
        assert stream.push(index % 256, m.Logprobs(index, -1.0, *top))
    deltas = taken(stream, made)
    sizes = [delta.ByteSize() for delta in deltas]
    assert max(sizes) <= LIMITS.event_bytes
    assert min(sizes[:-1]) > LIMITS.event_bytes * 0.8, "none is cut for nothing"
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [token.id for token in tokens] == [index % 256 for index in range(350)]
    assert all(token.logprob == -1.0 and len(token.top) == 20 for token in tokens)


# ------------------------------------------------------------ a stream that does not move ends


def test_a_stream_that_nobody_reads_gives_its_place_and_its_row_back(tmp_path: Path) -> None:
    """A window of 0 lets no message through, not even the first."""
    with served(tmp_path, SHORT_S) as service, RawClient(service.port, window=0) as client:
        stream, handle = begin(client, service)
        service.engine.output(handle, [1])
        assert service.engine.next_cancel() == handle
        wait_for(service, lambda: service.front_end.servicer.counters.open_streams == 0)
        assert service.front_end.servicer.counters.slow_readers == 1
        client.grant(stream, MAX_WINDOW)
        said = client.status_of(stream).payload
        assert RESOURCE_EXHAUSTED in said and b"nothing of the stream was read for 0.2 s" in said


def test_a_stream_that_has_nothing_to_say_is_not_one_that_nobody_reads(tmp_path: Path) -> None:
    with served(tmp_path, SHORT_S) as service, RawClient(service.port) as quiet:
        stream, handle = begin(quiet, service)
        quiet.messages_of(stream, 1)
        for _ in range(2):  # each of them is stalled for as long as the quiet one says nothing
            with RawClient(service.port, window=0) as stalled:
                other = stalled.begin("Generate")
                stalled.message(other, GenerateRequest(text="x").SerializeToString(), ends=True)
                assert service.engine.next_cancel() == service.engine.next_submit().handle != handle
        service.engine.output(handle, [1], FinishReason.LENGTH)
        assert [event.WhichOneof("event") for event in events(quiet.messages_of(stream, 2))] == ["delta", "finished"]
        assert OK in quiet.status_of(stream).payload


def test_an_end_that_nobody_reads_holds_no_place_and_stays_a_good_end(tmp_path: Path) -> None:
    with served(tmp_path, SHORT_S) as service:
        with RawClient(service.port) as reader:
            stream, handle = begin(reader, service)
            service.engine.output(handle, [1], FinishReason.LENGTH)
            *before, _ = reader.messages_of(stream, 3)
            reader.status_of(stream)
        window = sum(5 + len(message) for message in before)
        with RawClient(service.port, window=window) as client:
            stream, handle = begin(client, service)
            service.engine.output(handle, [1], FinishReason.LENGTH)
            client.messages_of(stream, 2)
            wait_for(service, lambda: service.front_end.servicer.counters.open_streams == 0)
            client.grant(stream, MAX_WINDOW)
            (end,) = events(client.messages_of(stream, 1))
            assert end.HasField("finished")
            assert OK in client.status_of(stream).payload
        assert service.front_end.servicer.counters.slow_readers == 0


def test_a_stream_whose_headers_do_not_leave_gives_its_place_back_too(tmp_path: Path) -> None:
    """The client does not read its socket, so that not even headers go."""
    top = tuple(range(20)), tuple(-float(i) for i in range(20))
    logprobs = [m.Logprobs(index, -1.0, *top) for index in range(200)]
    with served(tmp_path, SHORT_S) as service, RawClient(service.port, window=MAX_WINDOW, takes_bytes=4096) as client:
        client.frames_until(SETTINGS)
        client.send(SETTINGS, flags=ACK)
        client.grant(0, MAX_WINDOW - 65_535)
        _, filler = begin(client, service, logprobs=20)
        while service.engine.cancelled.empty():  # what the system keeps for the socket fills, and then the buffer
            service.engine.output(filler, [1] * 200, logprobs=logprobs)
            sync(service)  # no faster than the front end writes
        assert service.engine.next_cancel() == filler
        stream, handle = begin(client, service)
        assert service.engine.next_cancel() == handle
        wait_for(service, lambda: service.front_end.servicer.counters.open_streams == 0)
        assert b"nothing of the stream was read for 0.2 s" in client.status_of(stream).payload


@pytest.mark.parametrize("kind", [Completion, RequestStream])
def test_what_is_left_of_a_stalled_stream_has_neither_its_prompt_nor_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    made: list[weakref.ref[Any]] = []

    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made.append(weakref.ref(self))
        original(self, *arguments, **named)

    original: Callable[..., None] = vars(kind)["__init__"]
    monkeypatch.setattr(kind, "__init__", make)
    with served(tmp_path, SHORT_S) as service, RawClient(service.port, window=0) as client:
        client.frames_until(SETTINGS)
        client.send(SETTINGS, flags=ACK)  # or the connection would be ended after a while, and all of it
        _, handle = begin(client, service)
        assert service.engine.next_cancel() == handle
        assert len(made) == 1
        wait_for(service, lambda: made[0]() is None)
