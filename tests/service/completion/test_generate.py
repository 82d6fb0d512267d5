"""Streams, from the request to the last event, over a real port and a fake engine."""

from __future__ import annotations

import grpc
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    FinishReason,
    GenerateOnceRequest,
    GenerateRequest,
    GenerateResponse,
    OutputOptions,
    SamplingOptions,
    StoppingOptions,
    TokenIds,
)
from tests.service.fake_engine import TIMEOUT_S
from tests.service.running_service import Service
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text).ids


def text_of(events: list[GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events)


def tokens_of(events: list[GenerateResponse]) -> list[int]:
    return [token.id for event in events for token in event.delta.tokens]


def kinds(events: list[GenerateResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def request(text: str = "once", **options: object) -> GenerateRequest:
    return GenerateRequest(text=text, **options)  # type: ignore[arg-type]


def test_a_stream_is_accepted_first_then_deltas_then_finished_once(service: Service) -> None:
    call = service.stub.Generate(request(request_id="r-1"), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    for token in ids("hello wor"):
        service.engine.output(submit.handle, [token])
    service.engine.output(submit.handle, ids("ld"), EngineReason.LENGTH)
    events = list(call)
    assert kinds(events)[0] == "accepted" and kinds(events)[-1] == "finished"
    assert set(kinds(events)[1:-1]) == {"delta"}
    assert text_of(events) == "hello world"
    assert tokens_of(events) == ids("hello wor") + ids("ld")
    assert (events[0].accepted.request_id, events[0].accepted.server_id) == ("r-1", "server-1")
    assert events[0].accepted.prompt_tokens == len(ids("once"))
    finished = events[-1].finished
    assert finished.reason == FinishReason.FINISH_REASON_LENGTH
    assert finished.usage.completion_tokens == len(tokens_of(events))
    assert finished.timing.first_token.ToMilliseconds() == 750
    assert service.engine.cancelled.empty()


def test_times_that_the_engine_did_not_see_are_unset(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, [], EngineReason.ABORTED, times_s=(0.0, -1.0, -1.0, -1.0))
    timing = list(call)[-1].finished.timing
    assert [field.name for field, _ in timing.ListFields()] == ["queue"]


def test_what_is_unset_takes_the_documented_defaults(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.sampling == SamplingParams(temperature=1.0, top_p=1.0, seed=submit.sampling.seed, logprobs=-1)
    assert submit.stopping == StoppingParams(max_tokens=256)
    assert len(submit.request_id) == 32
    service.engine.output(submit.handle, ids("a"), EngineReason.CONTEXT_LENGTH)
    finished = list(call)[-1].finished
    assert finished.seed == submit.sampling.seed
    assert finished.reason == FinishReason.FINISH_REASON_CONTEXT_LENGTH


def test_an_explicit_seed_reaches_the_engine_and_comes_back(service: Service) -> None:
    call = service.stub.Generate(request(sampling=SamplingOptions(seed=2**64 - 1)), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.sampling.seed == 2**64 - 1
    service.engine.output(submit.handle, ids("a"), EngineReason.LENGTH)
    assert list(call)[-1].finished.seed == 2**64 - 1


def test_penalties_reach_the_engine(service: Service) -> None:
    options = SamplingOptions(repetition_penalty=1.25, presence_penalty=-0.5, frequency_penalty=2.0)
    call = service.stub.Generate(request(sampling=options), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    sampling = submit.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.25, -0.5, 2.0)
    service.engine.output(submit.handle, ids("a"), EngineReason.LENGTH)
    assert list(call)[-1].HasField("finished")


def test_cached_tokens_are_those_of_the_engines_end(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, ids("a"), EngineReason.LENGTH, cached_tokens=3)
    assert list(call)[-1].finished.usage.cached_tokens == 3


def test_drafts_are_those_of_the_engines_end_in_all_and_by_their_place(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    end = m.Finished(handle, int(EngineReason.LENGTH), drafted=(4, 3, 1), accepted=(3, 0, 0), tokens_per_launch=1.75)
    service.engine.output(handle, ids("a"))
    service.engine.send(m.Output(2, b"", b"", (), (end,)))
    usage = list(call)[-1].finished.usage
    assert (usage.drafted_tokens, usage.accepted_tokens, usage.tokens_per_launch) == (8, 3, 1.75)
    assert (usage.drafted_by_place, usage.accepted_by_place) == ({1: 4, 2: 3, 3: 1}, {1: 3, 2: 0, 3: 0})


def test_a_stop_string_that_the_engine_has_not_ended_at_leaves_drafts_unset(service: Service) -> None:
    call = service.stub.Generate(request(stopping=StoppingOptions(stop=["!"])), timeout=TIMEOUT_S)
    service.engine.output(service.engine.next_submit().handle, ids("a!"))
    usage = list(call)[-1].finished.usage
    assert not [name for name in ("drafted_tokens", "accepted_tokens", "tokens_per_launch") if usage.HasField(name)]
    assert not usage.drafted_by_place and not usage.accepted_by_place


def test_a_stop_string_ends_with_the_cached_tokens_and_the_queue_time_that_the_engine_sent_before(
    service: Service,
) -> None:
    call = service.stub.Generate(request(stopping=StoppingOptions(stop=["!"])), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.send(m.Admitted(submit.handle, cached_tokens=2, queue_s=0.125))
    service.engine.output(submit.handle, ids("a"))
    events = [next(call), next(call)]
    service.engine.output(submit.handle, ids("b!"))
    events += list(call)
    finished = events[-1].finished
    assert finished.stop.text == "!"
    assert finished.usage.cached_tokens == 2
    assert finished.timing.queue.ToMilliseconds() == 125
    assert not finished.timing.HasField("prefill"), "it was not seen here"
    assert service.engine.next_cancel() == submit.handle


def test_the_end_of_sequence_token_counts_and_has_no_text(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, [*ids("done"), END_ID], EngineReason.END_OF_SEQUENCE, END_ID)
    events = list(call)
    assert text_of(events) == "done"
    assert tokens_of(events)[-1] == END_ID
    assert events[-1].finished.stop.token_id == END_ID
    assert events[-1].finished.usage.completion_tokens == len(ids("done")) + 1


@pytest.mark.parametrize(("include_stop", "text"), [(False, "ab"), (True, "ab.")])
def test_a_stop_token_keeps_its_text_only_if_asked(service: Service, include_stop: bool, text: str) -> None:
    (dot,) = ids(".")
    stopping = StoppingOptions(stop_token_ids=[dot], include_stop=include_stop)
    call = service.stub.Generate(request(stopping=stopping), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.stopping.stop_token_ids == (dot,)
    service.engine.output(submit.handle, [*ids("ab"), dot], EngineReason.STOP, dot)
    events = list(call)
    assert text_of(events) == text
    assert tokens_of(events) == [*ids("ab"), dot]


def test_a_stop_string_across_token_borders_ends_and_trims_the_stream_and_voids_the_row(service: Service) -> None:
    call = service.stub.Generate(request(stopping=StoppingOptions(stop=["hello"])), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    for token in [*ids("say "), *ids("hell"), *ids("o there")]:
        service.engine.output(submit.handle, [token])
    events = list(call)
    assert text_of(events) == "say "
    finished = events[-1].finished
    assert service.engine.next_cancel() == submit.handle
    assert service.engine.cancel_reasons[submit.handle] == EngineReason.STOP
    assert (finished.reason, finished.stop.text) == (FinishReason.FINISH_REASON_STOP, "hello")
    assert finished.usage.completion_tokens == len(ids("say ")) == len(tokens_of(events))


def test_a_possible_stop_is_held_back_and_delivered_when_it_was_none(service: Service) -> None:
    call = service.stub.Generate(request(stopping=StoppingOptions(stop=["hello"])), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, ids("x hell"))
    events = [next(call), next(call)]
    assert events[1].delta.text == "x "
    service.engine.output(submit.handle, ids("p"))
    events.append(next(call))
    assert events[2].delta.text == "hellp"
    service.engine.output(submit.handle, ids("hell"), EngineReason.LENGTH)
    events += list(call)
    assert text_of(events) == "x hellphell"
    assert events[-1].finished.reason == FinishReason.FINISH_REASON_LENGTH
    assert events[-1].finished.usage.completion_tokens == len(tokens_of(events))


def test_include_stop_keeps_the_stop_string_and_nothing_after_it(service: Service) -> None:
    stopping = StoppingOptions(stop=["b"], include_stop=True)
    call = service.stub.Generate(request(stopping=stopping), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, ids("abab"), EngineReason.LENGTH)  # one token
    events = list(call)
    assert text_of(events) == "ab"
    assert events[-1].finished.stop.text == "b"
    assert events[-1].finished.usage.completion_tokens == 1


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("is_end", [False, True])
def test_the_id_of_a_special_token_is_a_stop_string_where_its_text_is(
    service: Service, is_end: bool, include_stop: bool
) -> None:
    """Whether the engine ends there or goes on."""
    stopping = StoppingOptions(stop=["<|end|>", "x"], include_stop=include_stop, ignore_eos=not is_end)
    call = service.stub.Generate(request(stopping=stopping), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    if is_end:
        service.engine.output(submit.handle, [*ids("ab"), END_ID], EngineReason.END_OF_SEQUENCE, END_ID)
    else:
        service.engine.output(submit.handle, [*ids("ab"), END_ID, *ids("c")])
    events = list(call)
    finished = events[-1].finished
    assert text_of(events) == ("ab<|end|>" if include_stop else "ab")
    assert tokens_of(events) == ([*ids("ab"), END_ID] if include_stop else ids("ab"))
    assert (finished.reason, finished.stop.text) == (FinishReason.FINISH_REASON_STOP, "<|end|>")
    assert finished.usage.completion_tokens == len(tokens_of(events))
    if not is_end:
        assert service.engine.next_cancel() == submit.handle


def test_characters_are_never_cut_however_the_tokens_are(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    tokens = ids("漢字 é 🙂")
    for token in tokens:
        service.engine.output(submit.handle, [token])
    service.engine.output(submit.handle, [], EngineReason.ABORTED)
    events = list(call)
    assert text_of(events) == "漢字 é 🙂"
    assert b"".join(token.bytes for event in events for token in event.delta.tokens).decode() == "漢字 é 🙂"


def test_log_probabilities_travel_with_their_tokens(service: Service) -> None:
    call = service.stub.Generate(request(output=OutputOptions(logprobs=2)), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.sampling.logprobs == 2
    (a,), (b,) = ids("a"), ids("b")
    service.engine.output(
        submit.handle, [a, b], EngineReason.LENGTH, logprobs=[m.Logprobs(1, -0.5, (b, a), (-0.5, -1.5))]
    )
    first, second = [token for event in call for token in event.delta.tokens]
    assert not first.HasField("logprob") and not first.top
    assert second.logprob == -0.5
    assert [(top.id, top.bytes, top.logprob) for top in second.top] == [(b, b"b", -0.5), (a, b"a", -1.5)]


def test_tokens_per_message_are_bounded_on_request(service: Service) -> None:
    call = service.stub.Generate(request(output=OutputOptions(max_tokens_per_message=2)), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, ids("wxyzv"), EngineReason.LENGTH)
    events = list(call)
    assert [len(event.delta.tokens) for event in events[1:-1]] == [2, 2, 1]
    assert [event.delta.text for event in events[1:-1]] == ["wx", "yz", "v"]


def test_token_ids_are_taken_as_they_are(service: Service) -> None:
    call = service.stub.Generate(GenerateRequest(token_ids=TokenIds(ids=[5, 299])), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.prompt == b"\5\0\0\0\x2b\1\0\0"
    service.engine.output(submit.handle, [299], EngineReason.LENGTH)
    (token,) = [token for event in call for token in event.delta.tokens]
    assert (token.id, token.bytes) == (299, b"")


def test_generate_once_is_the_whole_stream_in_one_message(service: Service) -> None:
    future = service.stub.GenerateOnce.future(
        GenerateOnceRequest(text="once", request_id="o", stopping=StoppingOptions(stop=["!"])), timeout=TIMEOUT_S
    )
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, ids("up"))
    service.engine.output(submit.handle, ids("on! a"))
    answer = future.result()
    assert answer.text == "upon"
    assert answer.accepted.request_id == "o"
    assert answer.finished.stop.text == "!"
    assert len(answer.tokens) == answer.finished.usage.completion_tokens
    assert service.engine.next_cancel() == submit.handle


def test_abort_ends_the_stream_aborted_and_answers_for_each_id(service: Service) -> None:
    call = service.stub.Generate(request(request_id="victim"), timeout=TIMEOUT_S)
    service.engine.next_submit()
    assert next(call).accepted.request_id == "victim"
    answer = service.stub.Abort(AbortRequest(request_ids=["victim", "nobody"]), timeout=TIMEOUT_S)
    assert [(result.request_id, result.outcome) for result in answer.results] == [
        ("victim", AbortOutcome.ABORT_OUTCOME_ABORTED),
        ("nobody", AbortOutcome.ABORT_OUTCOME_NOT_FOUND),
    ]
    (end,) = list(call)
    assert end.finished.reason == FinishReason.FINISH_REASON_ABORTED


def test_abort_of_all_ends_every_stream(service: Service) -> None:
    calls = [service.stub.Generate(request(request_id=f"r{i}"), timeout=TIMEOUT_S) for i in range(3)]
    for call in calls:
        next(call)
    answer = service.stub.Abort(AbortRequest(all=True), timeout=TIMEOUT_S)
    assert sorted(result.request_id for result in answer.results) == ["r0", "r1", "r2"]
    assert [list(call)[-1].finished.reason for call in calls] == [FinishReason.FINISH_REASON_ABORTED] * 3


@pytest.mark.parametrize("phase", ["before it is accepted", "queued", "decoding"])
def test_a_cancelled_stream_is_cancelled_in_the_engine(service: Service, phase: str) -> None:
    service.engine.auto_accept = phase != "before it is accepted"
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    if phase == "decoding":
        service.engine.output(submit.handle, ids("a"))
        assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    call.cancel()
    assert service.engine.next_cancel() == submit.handle
    assert service.engine.cancel_reasons[submit.handle] == EngineReason.CANCELLED


def test_a_cancelled_unary_call_is_cancelled_in_the_engine(service: Service) -> None:
    future = service.stub.GenerateOnce.future(GenerateOnceRequest(text="once"), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    future.cancel()
    assert service.engine.next_cancel() == submit.handle


def test_a_passed_deadline_cancels_in_the_engine(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=0.2)
    submit = service.engine.next_submit()
    with pytest.raises(grpc.RpcError) as failed:
        list(call)
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.engine.next_cancel() == submit.handle
