"""The prompt sent back: echo and log-probabilities, in order, complete, within a message's bounds, over a real port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest
from google.rpc import error_details_pb2

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.service.completion.events import PromptEvents, check_once_prompt
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import check_request
from runahead.service.text.text import TokenBytes, token_bytes
from runahead.v1 import (
    AbortRequest,
    FinishReason,
    GenerateOnceRequest,
    GenerateRequest,
    GenerateResponse,
    GenerationServiceStub,
    OutputOptions,
    Prompt,
    StatsRequest,
    TokenIds,
)
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure, fields, words
from tests.service.running_service import Service
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer

LONG = msgspec.structs.replace(INFO, context_length=1 << 17)
TABLE = token_bytes(byte_level_tokenizer(), {END_ID})
IDS = [5, 257, 6, 299, 7]  # 257: two bytes; 299: an id without a token


@pytest.fixture
def long_context(tmp_path: Path) -> Iterator[Service]:
    path = tmp_path / "engine.sock"
    engine = FakeEngine(path, m.Welcome(m.PROTOCOL_VERSION, "server-1", LONG))
    with Service(engine, path) as running:
        yield running


def request(ids: list[int] = IDS, **output: object) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=TokenIds(ids=ids),
        output=OutputOptions(**output),  # type: ignore[arg-type]
    )


def once(ids: list[int] = IDS, **output: object) -> GenerateOnceRequest:
    return GenerateOnceRequest.FromString(request(ids, **output).SerializeToString())


def kinds(events: list[GenerateResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def prompts_of(events: list[GenerateResponse]) -> list[Prompt]:
    return [event.prompt for event in events if event.HasField("prompt")]


def assert_complete(prompts: list[Prompt], ids: list[int]) -> None:
    """Each token of the prompt once, in order, and every offset where its event begins."""
    assert [token.id for prompt in prompts for token in prompt.tokens] == ids
    places = [0, *np.cumsum([len(prompt.tokens) for prompt in prompts]).tolist()]
    assert [prompt.offset for prompt in prompts] == places[:-1]


# ---------------------------------------------------------------- echo


def test_echo_sends_the_prompts_tokens_with_their_bytes_before_any_delta(service: Service) -> None:
    call = service.stub.Generate(request(echo=True), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.sampling.prompt_logprobs == -1, "the engine has no work with it"
    service.engine.output(submit.handle, [1, 2], EngineReason.LENGTH)
    events = list(call)
    assert kinds(events) == ["accepted", "prompt", "delta", "finished"]
    (prompt,) = prompts_of(events)
    assert_complete([prompt], IDS)
    assert [token.bytes for token in prompt.tokens] == [TABLE.of(token_id) for token_id in IDS]
    assert not any(token.HasField("logprob") or token.top for token in prompt.tokens)


def test_an_echo_comes_while_the_request_still_waits_for_a_row(service: Service) -> None:
    call = service.stub.Generate(request(echo=True), timeout=TIMEOUT_S)
    assert kinds([next(call), next(call)]) == ["accepted", "prompt"]
    service.engine.output(service.engine.next_submit().handle, [], EngineReason.ABORTED)
    assert kinds(list(call)) == ["finished"]


def test_without_either_option_there_is_no_prompt_event(service: Service) -> None:
    call = service.stub.Generate(request(echo=False), timeout=TIMEOUT_S)
    service.engine.output(service.engine.next_submit().handle, [1], EngineReason.LENGTH)
    assert kinds(list(call)) == ["accepted", "delta", "finished"]


def test_tokens_in_an_echo_are_bounded_on_request(service: Service) -> None:
    call = service.stub.Generate(request(echo=True, max_tokens_per_message=2), timeout=TIMEOUT_S)
    service.engine.output(service.engine.next_submit().handle, [1], EngineReason.LENGTH)
    prompts = prompts_of(list(call))
    assert [len(prompt.tokens) for prompt in prompts] == [2, 2, 1]
    assert_complete(prompts, IDS)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_of_the_prompt_come_as_the_engine_computes_them(service: Service, echo: bool) -> None:
    call = service.stub.Generate(request(prompt_logprobs=2, echo=echo), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.sampling.prompt_logprobs == 2
    assert kinds([next(call)]) == ["accepted"]
    tops = [[257, 3], [4, 6], [299, 0], [7, 1]]
    values = [[-0.5, -1.5], [-0.25, -2.5], [-0.125, -3.5], [0.0, -4.5]]
    service.engine.prompt_logprobs(submit.handle, 1, [-0.5, -2.5], tops[:2], values[:2])
    prompts = [next(call).prompt]
    assert [token.id for token in prompts[0].tokens] == IDS[:3], (
        "the first token comes with the first that is described"
    )
    service.engine.prompt_logprobs(submit.handle, 3, [-0.125, 0.0], tops[2:], values[2:])
    service.engine.output(submit.handle, [1], EngineReason.LENGTH)
    rest = list(call)
    assert kinds(rest) == ["prompt", "delta", "finished"]
    prompts += prompts_of(rest)
    assert_complete(prompts, IDS)
    first, *described = [token for prompt in prompts for token in prompt.tokens]
    assert not first.HasField("logprob") and not first.top, "nothing comes before the first token"
    assert [token.logprob for token in described] == [-0.5, -2.5, -0.125, 0.0]
    assert all(token.HasField("logprob") for token in described)
    assert [[top.id for top in token.top] for token in described] == tops
    assert [[top.logprob for top in token.top] for token in described] == values
    assert [top.bytes for top in described[0].top] == [TABLE.of(257), TABLE.of(3)]


def test_no_top_tokens_are_sent_where_none_were_asked_for(service: Service) -> None:
    call = service.stub.Generate(request(prompt_logprobs=0), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.sampling.prompt_logprobs == 0
    service.engine.prompt_logprobs(submit.handle, 1, [-1.0, -2.0, -3.0, -4.0])
    service.engine.output(submit.handle, [1], EngineReason.LENGTH)
    (prompt,) = prompts_of(list(call))
    assert [token.logprob for token in prompt.tokens[1:]] == [-1.0, -2.0, -3.0, -4.0]
    assert not any(token.top for token in prompt.tokens)


def test_a_prompt_of_one_token_has_no_log_probability_to_wait_for(service: Service) -> None:
    call = service.stub.Generate(request([9], prompt_logprobs=3), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    events = [next(call), next(call)]
    assert_complete(prompts_of(events), [9])
    service.engine.output(submit.handle, [1], EngineReason.LENGTH)
    assert kinds(list(call)) == ["delta", "finished"]


def test_described_tokens_are_bounded_on_request_too(service: Service) -> None:
    call = service.stub.Generate(request(prompt_logprobs=0, max_tokens_per_message=2), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.prompt_logprobs(submit.handle, 1, [-1.0, -2.0, -3.0, -4.0])
    service.engine.output(submit.handle, [1], EngineReason.LENGTH)
    prompts = prompts_of(list(call))
    assert [len(prompt.tokens) for prompt in prompts] == [2, 2, 1]
    assert_complete(prompts, IDS)


def test_a_long_prompt_is_cut_where_an_event_is_large_enough(long_context: Service) -> None:
    ids = [token_id % 300 for token_id in range(3000)]
    call = long_context.stub.Generate(request(ids, prompt_logprobs=20), timeout=60)
    submit = long_context.engine.next_submit()
    tops = np.tile(np.arange(20), (2999, 1))
    for begin in range(0, 2999, 500):
        end = min(begin + 500, 2999)
        long_context.engine.prompt_logprobs(
            submit.handle, 1 + begin, -np.arange(begin, end) / 8, tops[begin:end], -tops[begin:end] / 4
        )
    long_context.engine.output(submit.handle, [1], EngineReason.LENGTH)
    prompts = prompts_of(list(call))
    assert_complete(prompts, ids)
    assert all(prompt.ByteSize() < LIMITS.event_bytes for prompt in prompts)
    assert max(prompt.ByteSize() for prompt in prompts) > LIMITS.event_bytes * 0.9, "none is cut for nothing"
    described = [token for prompt in prompts for token in prompt.tokens][1:]
    assert [token.logprob for token in described] == [-place / 8 for place in range(2999)]


def test_an_abort_in_the_middle_ends_the_stream_with_what_has_come(service: Service) -> None:
    call = service.stub.Generate(request(prompt_logprobs=0), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.prompt_logprobs(submit.handle, 1, [-1.0])
    events = [next(call), next(call)]
    service.stub.Abort(AbortRequest(request_ids=["r"]), timeout=TIMEOUT_S)
    events += list(call)
    assert kinds(events) == ["accepted", "prompt", "finished"]
    assert [token.id for token in events[1].prompt.tokens] == IDS[:2]
    assert events[-1].finished.reason == FinishReason.FINISH_REASON_ABORTED


def test_a_cancelled_call_in_the_middle_is_cancelled_in_the_engine(service: Service) -> None:
    call = service.stub.Generate(request(prompt_logprobs=0), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.prompt_logprobs(submit.handle, 1, [-1.0])
    assert kinds([next(call), next(call)]) == ["accepted", "prompt"]
    call.cancel()
    assert service.engine.next_cancel() == submit.handle


def test_a_prompt_that_is_not_finite_fails_the_call(service: Service) -> None:
    call = service.stub.Generate(request(prompt_logprobs=0), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.prompt_logprobs(submit.handle, 1, [-1.0])
    service.engine.output(submit.handle, [], EngineReason.NON_FINITE)
    assert code(failure(lambda: list(call))) == grpc.StatusCode.INTERNAL


def test_a_lost_engine_in_the_middle_ends_the_call_with_unavailable(service: Service) -> None:
    call = service.stub.Generate(request(prompt_logprobs=0), timeout=TIMEOUT_S)
    service.engine.prompt_logprobs(service.engine.next_submit().handle, 1, [-1.0])
    assert kinds([next(call), next(call)]) == ["accepted", "prompt"]
    service.engine.die()
    assert code(failure(lambda: list(call))) == grpc.StatusCode.UNAVAILABLE


def test_a_reader_that_leaves_too_much_of_the_prompt_unread_is_ended_while_its_neighbour_goes_on(
    long_context: Service,
) -> None:
    engine, count, step = long_context.engine, LONG.context_length - 1, 512
    top_ids = np.zeros((step, 20), "<i4")
    no_probe = [("grpc.http2.bdp_probe", 0)]  # it would let the server send more than is read
    with grpc.insecure_channel(f"127.0.0.1:{long_context.port}", no_probe) as channel:
        slow = GenerationServiceStub(channel).Generate(request([1] * count, prompt_logprobs=20), timeout=60)
        handle = engine.next_submit().handle
        neighbour = long_context.stub.Generate(GenerateRequest(text="once"), timeout=60)
        neighbour_handle = engine.next_submit().handle
        sent = 0
        while engine.cancelled.empty() and sent + step < count:  # nobody reads: the transport fills, then the buffer
            engine.prompt_logprobs(handle, 1 + sent, np.zeros(step), top_ids, top_ids)
            sent += step
        assert engine.next_cancel() == handle
        assert sent * 164 > LIMITS.unread_prompt_bytes
        engine.output(neighbour_handle, [1], EngineReason.LENGTH)
        assert list(neighbour)[-1].HasField("finished")
        error = failure(lambda: list(slow))
        assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    stats = long_context.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end
    assert (stats.slow_readers, stats.open_streams) == (1, 0)


# ---------------------------------------------------------------- GenerateOnce


def test_generate_once_has_the_whole_prompt_in_one_message(service: Service) -> None:
    future = service.stub.GenerateOnce.future(once(prompt_logprobs=1), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    service.engine.prompt_logprobs(submit.handle, 1, [-1.0, -2.0], [[3], [4]], [[-0.5], [-0.25]])
    service.engine.prompt_logprobs(submit.handle, 3, [-3.0, -4.0], [[5], [6]], [[-0.5], [-0.25]])
    service.engine.output(submit.handle, [1], EngineReason.LENGTH)
    answer = future.result()
    assert_complete([answer.prompt], IDS)
    assert [token.logprob for token in answer.prompt.tokens[1:]] == [-1.0, -2.0, -3.0, -4.0]
    assert [top.id for token in answer.prompt.tokens for top in token.top] == [3, 4, 5, 6]
    assert [token.id for token in answer.tokens] == [1]


def test_generate_once_echoes_and_leaves_the_prompt_unset_where_it_was_not_asked_for(service: Service) -> None:
    for echo in (True, False):
        future = service.stub.GenerateOnce.future(once(echo=echo), timeout=TIMEOUT_S)
        service.engine.output(service.engine.next_submit().handle, [1], EngineReason.LENGTH)
        answer = future.result()
        assert answer.HasField("prompt") is echo
        assert_complete([answer.prompt] if echo else [], IDS if echo else [])


@pytest.mark.parametrize(
    ("ids", "output", "field"),
    [
        ([1] * 10_000, {"prompt_logprobs": 20}, "output.prompt_logprobs"),
        ([1] * 10_000, {"prompt_logprobs": 20, "echo": True}, "output.prompt_logprobs"),
        ([END_ID] * 130_000, {"echo": True}, "output.echo"),
    ],
)
def test_generate_once_refuses_a_prompt_that_may_not_fit_its_answer_before_the_engine_sees_it(
    long_context: Service, ids: list[int], output: dict[str, object], field: str
) -> None:
    error = failure(lambda: long_context.stub.GenerateOnce(once(ids, **output), timeout=TIMEOUT_S))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert "Generate sends them in parts" in words(error)
    assert detail(error, error_details_pb2.RequestInfo).request_id == "r"
    assert long_context.engine.submitted.empty()
    call = long_context.stub.Generate(request(ids, **output), timeout=TIMEOUT_S)
    assert next(call).HasField("accepted"), "as a stream it is taken"
    call.cancel()
    long_context.engine.next_cancel()


def test_what_generate_once_takes_is_never_larger_than_it_allows() -> None:
    """The longest tokens, the largest ids, at the most that is let through."""
    spelled = tuple(b"x" * (150 + place % 50) for place in range(4000))
    table = TokenBytes(spelled, frozenset(), tuple(sorted(map(len, spelled), reverse=True)[:20]))
    info = msgspec.structs.replace(LONG, vocab_size=len(spelled))
    longest = sorted(range(len(spelled)), key=lambda token_id: len(spelled[token_id]), reverse=True)[:20]
    sizes = []
    for count in range(100, 1000, 10):
        prompt = np.full(count, longest[0], np.int32)
        checked = check_request(request([1], prompt_logprobs=20), info)
        try:
            check_once_prompt(checked, prompt, table)
        except ServiceError:
            break
        part = m.PromptLogprobs(
            handle=1,
            offset=1,
            chosen=np.full(count - 1, -1e30, "<f4").tobytes(),
            top_ids=np.tile(np.array(longest, "<i4"), (count - 1, 1)).tobytes(),
            top_logprobs=np.full((count - 1, 20), -1e30, "<f4").tobytes(),
        )
        events = PromptEvents(checked, prompt, table).with_logprobs(part)
        sizes.append(sum(event.ByteSize() for event in events))
    assert max(sizes) <= LIMITS.once_prompt_bytes
    assert max(sizes) > LIMITS.once_prompt_bytes * 0.9, "no prompt is refused for nothing"
