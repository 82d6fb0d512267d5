"""Several completions of one prompt, from the request to the last event, over a real port and a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.service.engine.request_stream import RequestStream, SlowReaderError
from runahead.service.shared_memory.call_tables import Resource
from runahead.v1 import (
    FinishReason,
    GenerateOnceRequest,
    GenerateRequest,
    GetModelInfoRequest,
    OutputOptions,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
)
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure, fields, words
from tests.service.running_service import Service
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer

MOST_SEED = 2**64 - 1


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text).ids


def request(n: int = 3, **options: Any) -> GenerateRequest:
    return GenerateRequest(text="once", request_id="r-1", n=n, **options)


def by_index(call: Iterator[Any]) -> tuple[dict[int, str], dict[int, Any], list[str]]:
    """Texts and ends by index, and the kinds of events in order. No delta follows the end of its completion."""
    texts, ends, kinds = dict[int, str](), dict[int, Any](), list[str]()
    for event in call:
        kinds.append(event.WhichOneof("event"))
        if event.HasField("delta"):
            assert event.delta.index not in ends
            texts[event.delta.index] = texts.get(event.delta.index, "") + event.delta.text
        elif event.HasField("finished"):
            assert event.finished.index not in ends, "exactly once for each index"
            ends[event.finished.index] = event.finished
    return texts, ends, kinds


def test_each_completion_has_its_deltas_its_end_and_its_seed(service: Service) -> None:
    call = service.stub.Generate(request(sampling=SamplingOptions(seed=MOST_SEED - 1)), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert (submit.n, submit.sampling.seed) == (3, MOST_SEED - 1)
    first, second, third = range(submit.handle, submit.handle + 3)
    service.engine.output(second, ids("two"), EngineReason.LENGTH, cached_tokens=2)
    service.engine.output(first, ids("o"))
    service.engine.output(third, [*ids("three"), END_ID], EngineReason.END_OF_SEQUENCE, END_ID)
    service.engine.output(first, ids("ne"), EngineReason.LENGTH)
    texts, ends, kinds = by_index(call)
    assert texts == {0: "one", 1: "two", 2: "three"}
    assert kinds[0] == "accepted" and kinds.count("accepted") == 1 and kinds[-1] == "finished"
    assert {index: end.seed for index, end in ends.items()} == {0: MOST_SEED - 1, 1: MOST_SEED, 2: 0}
    assert {index: end.usage.completion_tokens for index, end in ends.items()} == {0: 3, 1: 3, 2: 6}
    assert {index: end.usage.cached_tokens for index, end in ends.items()} == {0: 0, 1: 2, 2: 0}
    assert {end.usage.prompt_tokens for end in ends.values()} == {4}
    assert ends[2].reason == FinishReason.FINISH_REASON_END_OF_SEQUENCE


def test_tokens_that_arrive_together_are_told_in_turns(service: Service) -> None:
    call = service.stub.Generate(request(2, output=OutputOptions(max_tokens_per_message=1)), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    next(call)
    service.engine.output(handle, ids("aaaa"), EngineReason.LENGTH)
    service.engine.output(handle + 1, ids("bbbb"), EngineReason.LENGTH)
    order = [event.delta.index for event in call if event.HasField("delta")]
    assert sorted(order) == [0] * 4 + [1] * 4
    assert 1 in order[:6], "the second has its turn before the first has ended"


def test_a_whole_answer_has_completion_0_in_its_place_and_the_others_behind_it(service: Service) -> None:
    asked = GenerateOnceRequest(text="once", n=3, sampling=SamplingOptions(seed=5), output=OutputOptions(echo=True))
    answer = service.stub.GenerateOnce.future(asked, timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    for index, text in enumerate(("one", "two", "three")):
        service.engine.output(handle + index, ids(text), EngineReason.LENGTH)
    found = answer.result()
    assert (found.text, found.finished.seed, found.finished.index) == ("one", 5, 0)
    assert [(one.text, one.finished.seed, one.finished.index) for one in found.more] == [("two", 6, 1), ("three", 7, 2)]
    assert [[token.id for token in one.tokens] for one in (found, *found.more)] == [
        ids("one"),
        ids("two"),
        ids("three"),
    ]
    assert [token.id for token in found.prompt.tokens] == ids("once")


def test_a_stop_string_ends_the_completion_that_has_it(service: Service) -> None:
    call = service.stub.Generate(request(2, stopping=StoppingOptions(stop=["!"])), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    service.engine.output(handle, ids("stop!more"))
    assert service.engine.next_cancel() == handle and service.engine.cancel_reasons == {handle: EngineReason.STOP}
    service.engine.output(handle + 1, ids("goes on"), EngineReason.LENGTH)
    texts, ends, _ = by_index(call)
    assert texts == {0: "stop", 1: "goes on"}
    assert ends[0].stop.text == "!" and ends[1].reason == FinishReason.FINISH_REASON_LENGTH


def test_a_completion_that_fails_ends_the_call_with_its_index_and_the_others_are_void(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    next(call)
    service.engine.output(handle, ids("one"), EngineReason.LENGTH)
    service.engine.output(handle + 1, ids("t"), EngineReason.NON_FINITE)
    error = failure(lambda: list(call))
    assert code(error) is grpc.StatusCode.INTERNAL
    assert str(error.details()).startswith("completion 1: the model's logits are not finite")
    info = detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, dict(info.metadata)) == ("NON_FINITE", {"index": "1"})
    assert service.engine.next_cancel() == handle + 2
    assert service.engine.cancelled.empty(), "those that have ended are not cancelled"


def test_what_a_slow_reader_leaves_unread_is_counted_together() -> None:
    async def body() -> None:
        first = RequestStream(1, unread_bytes=100)  # of two tokens
        second = RequestStream(2, unread_bytes=100, first=first)
        for _ in range(3):
            assert first.push(5, None) and second.push(6, None)
            assert ((await second.take()).token_ids, (await first.take()).token_ids) == ([6], [5])
        assert first.push(5, None) and second.push(6, None)
        assert not second.push(7, None), "each has less than its bound alone"
        assert isinstance(first.failure, SlowReaderError) and first.ended and second.ended

    asyncio.run(body())


def test_a_client_that_leaves_cancels_all(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    next(call)
    service.engine.output(handle + 1, ids("two"), EngineReason.LENGTH)
    assert any(event.HasField("finished") for event in call_until_finished(call))
    call.cancel()
    assert sorted(service.engine.next_cancel() for _ in range(2)) == [handle, handle + 2]


def call_until_finished(call: Iterator[Any]) -> Iterator[Any]:
    for event in call:
        yield event
        if event.HasField("finished"):
            return


def test_a_deadline_ends_all(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=0.3)
    handle = service.engine.next_submit().handle
    assert code(failure(lambda: list(call))) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert sorted(service.engine.next_cancel() for _ in range(3)) == [handle, handle + 1, handle + 2]


def test_an_abort_ends_each_and_none_is_a_failure(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    for one in range(handle, handle + 3):
        service.engine.output(one, (), EngineReason.ABORTED)
    _, ends, _ = by_index(call)
    assert [ends[index].reason for index in range(3)] == [FinishReason.FINISH_REASON_ABORTED] * 3


def test_an_engine_that_is_lost_ends_the_call_once(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    next(call)
    service.engine.output(handle, ids("one"), EngineReason.LENGTH)
    service.engine.die()
    assert code(failure(lambda: list(call))) is grpc.StatusCode.UNAVAILABLE


def test_a_refusal_ends_the_call_and_its_handles_are_not_used_again(service: Service) -> None:
    service.engine.live = dict.fromkeys("abcd", 0)
    refused = failure(lambda: list(service.stub.Generate(request(), timeout=TIMEOUT_S)))
    assert code(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
    service.engine.live = {}
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    assert service.engine.next_submit().handle == 4, "1 to 3 were refused"
    call.cancel()


@pytest.mark.parametrize("n", [0, 13, 17, 2**32 - 1])
def test_n_is_bounded_by_the_contract_and_by_what_rows_and_queue_hold(service: Service, n: int) -> None:
    assert INFO.max_rows + INFO.max_queue == 12
    error = failure(lambda: list(service.stub.Generate(request(n), timeout=TIMEOUT_S)))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["n"])
    assert str(error.details()) == f"n must be 1 to 12, and is {n}"
    assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).limits.completions == 12


def test_streams_are_counted_n_times_until_the_call_ends(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert open_streams(service) == 3
    service.engine.output(submit.handle, ids("x"), EngineReason.LENGTH)
    call_until_finished(call)
    assert open_streams(service) == 3
    for one in (1, 2):
        service.engine.output(submit.handle + one, ids("x"), EngineReason.LENGTH)
    by_index(call)
    assert open_streams(service) == 0


def test_a_call_that_alone_is_over_the_limit_is_told_what_it_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, max_streams=2) as service:
        error = failure(lambda: list(service.stub.Generate(request(3), timeout=TIMEOUT_S)))
    assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (
        words(error) == "0 completions are open, the call asks for 3 more, and this server's limit is 2 (max_streams)"
    )


def open_streams(service: Service) -> int:
    return int(service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end.open_streams)


def test_one_completion_is_sent_as_ever(service: Service) -> None:
    call = service.stub.Generate(request(1), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.n == 1 and m.decode_to_engine(m.encode_frame(submit)[4:]) == submit
    service.engine.output(submit.handle, ids("x"), EngineReason.LENGTH)
    _, ends, _ = by_index(call)
    assert (ends[0].index, ends[0].seed) == (0, submit.sampling.seed)


def test_the_prompt_waits_once_for_each_completion_until_it_has_a_row(service: Service) -> None:
    def queued() -> int:
        return int(service.front_end.servicer._board.held.in_all()[Resource.QUEUED_TOKENS])

    call = service.stub.Generate(request(3), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    assert next(call).HasField("accepted") and queued() == 3 * 4
    for rows, completion in enumerate((handle + 1, handle), start=1):
        service.engine.send(m.Admitted(completion, 0, 0.1))
        service.engine.output(completion, ids("o"))
        assert next(call).HasField("delta") and queued() == (3 - rows) * 4
    for completion in range(handle, handle + 3):
        service.engine.output(completion, ids("o"), EngineReason.LENGTH)
    assert len(list(call)) == 6 and queued() == 0
