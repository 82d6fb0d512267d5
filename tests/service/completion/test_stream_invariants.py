"""What every stream is, however its tokens come and however it is read: looked at over a real port.

The client's window of HTTP/2 is closed at first, and opened by as many bytes at a time as the example says, so that
tokens pile up behind messages that are stuck at any byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.v1 import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    OutputOptions,
    StatsRequest,
    StoppingOptions,
)
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.raw_http2 import ACK, DATA, END_STREAM, HEADERS, MAX_WINDOW, SETTINGS, RawClient
from tests.service.running_service import Service
from tests.service.small_tokenizers import END_ID
from tests.service.text.test_text import BYTE_LEVEL, BYTES_OF_BYTE_LEVEL, byte_level_ids, naive, stop_strings, texts

OK = b"grpc-status\x010"
_REASONS = {
    EngineReason.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    EngineReason.ABORTED: FinishReason.FINISH_REASON_ABORTED,
    EngineReason.END_OF_SEQUENCE: FinishReason.FINISH_REASON_END_OF_SEQUENCE,
}


@dataclass(frozen=True)
class Life:
    """A request, what the engine says to it, and how it is read.

    launches: tokens that come in one message of the engine each. grants: bytes that the client takes after each of
    them; 0 is none. waits: whether the front end has read a launch before the next one is said.
    """

    request: GenerateRequest
    token_ids: tuple[int, ...]
    launches: tuple[int, ...]
    grants: tuple[int, ...]
    waits: tuple[bool, ...]
    end: EngineReason


@st.composite
def lives(draw: st.DrawFn) -> Life:
    ids = tuple(draw(byte_level_ids | texts.map(lambda text: BYTE_LEVEL.encode(text).ids)))
    bound, logprobs = draw(st.none() | st.integers(1, 5)), draw(st.sampled_from([None, 0, 3]))
    output = OutputOptions(max_tokens_per_message=bound, logprobs=logprobs)
    stopping = StoppingOptions(stop=draw(stop_strings), include_stop=draw(st.booleans()), max_tokens=50)
    launches, left = list[int](), len(ids)
    while left:
        launches.append(draw(st.integers(1, min(left, 12))))
        left -= launches[-1]
    count = len(launches)
    grants = draw(st.lists(st.sampled_from([0, 0, 1, 9, 40, 200]), min_size=count, max_size=count))
    waits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    end = draw(st.sampled_from(sorted(_REASONS)))
    request = GenerateRequest(text="x", stopping=stopping, output=output)
    return Life(request, ids, tuple(launches), tuple(grants), tuple(waits), end)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("engine") / "engine.sock"
    with Service(FakeEngine(path), path) as running:
        yield running


# An end token that comes inside a character which is never whole, and which then is a stop string.
CUT_CHARACTER = GenerateRequest(text="x", stopping=StoppingOptions(stop=["\ufffd"], include_stop=True, max_tokens=50))


@given(lives())
@example(Life(CUT_CHARACTER, (126,), (1,), (0,), (False,), EngineReason.END_OF_SEQUENCE))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_stream_is_whole_in_order_and_ends_once(shared: Service, life: Life) -> None:
    events, trailers = lived(shared, life)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", *["delta"] * (len(kinds) - 2), "finished"]
    assert OK in trailers, "and the call ends well"
    deltas, finished = [event.delta for event in events[1:-1]], events[-1].finished
    tokens = [token for delta in deltas for token in delta.tokens]

    stops, include = tuple(life.request.stopping.stop), life.request.stopping.include_stop
    end = [END_ID] if life.end == EngineReason.END_OF_SEQUENCE else []
    is_text = include or BYTES_OF_BYTE_LEVEL.of(END_ID).decode() in stops
    said = [*life.token_ids, *(end if is_text else [])]
    text, kept, matched = naive(BYTES_OF_BYTE_LEVEL, said, stops, include)
    expected = said[:kept]
    if matched is None and not is_text:
        expected += end
    assert "".join(delta.text for delta in deltas) == text
    assert [token.id for token in tokens] == expected
    assert [token.bytes for token in tokens] == [BYTES_OF_BYTE_LEVEL.of(token_id) for token_id in expected]
    assert all(delta.text or delta.tokens for delta in deltas), "no message says nothing"
    bound = life.request.output.max_tokens_per_message or 1024
    assert all(len(delta.tokens) <= bound for delta in deltas)
    if life.request.output.HasField("logprobs"):
        assert [token.logprob for token in tokens] == [-float(place) for place in range(len(expected))]
        assert {len(token.top) for token in tokens} <= {life.request.output.logprobs}
    if not include:
        seen = ""
        for delta in deltas:
            seen += delta.text
            assert not any(stop in seen for stop in stops), "what ends the text is never shown"

    assert finished.usage.completion_tokens == len(expected)
    if matched is not None:
        assert (finished.reason, finished.stop.text) == (FinishReason.FINISH_REASON_STOP, matched)
    else:
        assert finished.reason == _REASONS[life.end]


def lived(service: Service, life: Life) -> tuple[list[GenerateResponse], bytes]:
    """The events that the client gets, and the headers that end the call."""
    with RawClient(service.port, window=0) as client:
        client.frames_until(SETTINGS)
        client.send(SETTINGS, flags=ACK)
        stream = client.begin("Generate")
        client.message(stream, life.request.SerializeToString(), ends=True)
        handle = service.engine.next_submit().handle
        said = 0
        for count, grant, waits in zip(life.launches, life.grants, life.waits, strict=True):
            say(service, life, handle, said, count)
            said += count
            if grant:
                client.grant(stream, grant)
            if waits:
                service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S)
        last = [END_ID] if life.end == EngineReason.END_OF_SEQUENCE else []
        stop_token_id = END_ID if last else -1
        service.engine.output(handle, last, life.end, stop_token_id, logprobs=scores(life, said, len(last)))
        client.grant(stream, MAX_WINDOW - sum(life.grants))
        payload = b""
        while True:
            frame = client.next_frame()
            payload += frame.payload if frame.kind == DATA else b""
            if frame.kind == HEADERS and frame.flags & END_STREAM:
                break
    events = []
    while payload:
        end = 5 + int.from_bytes(payload[1:5])
        events.append(GenerateResponse.FromString(payload[5:end]))
        payload = payload[end:]
    return events, frame.payload


def say(service: Service, life: Life, handle: int, begin: int, count: int) -> None:
    ids = life.token_ids[begin : begin + count]
    service.engine.output(handle, ids, logprobs=scores(life, begin, count))


def scores(life: Life, begin: int, count: int) -> list[m.Logprobs]:
    """A token's log-probability says which place it has in the stream."""
    if not life.request.output.HasField("logprobs"):
        return []
    top = tuple(range(life.request.output.logprobs)), tuple(-1.0 for _ in range(life.request.output.logprobs))
    return [m.Logprobs(index, -float(begin + index), *top) for index in range(count)]
