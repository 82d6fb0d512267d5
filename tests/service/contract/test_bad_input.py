"""What can't be is refused with the path of the field; nothing reaches the engine, and nothing else is disturbed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from google.rpc import error_details_pb2

from runahead.runtime.row_record import token_mask
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract import errors
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import check_request
from runahead.service.settings.settings import FrontEndSettings
from runahead.v1 import (
    AbortRequest,
    Chat,
    ChatMessage,
    Choice,
    DetokenizeRequest,
    GenerateOnceRequest,
    GenerateRequest,
    OutputOptions,
    SamplingOptions,
    StoppingOptions,
    Structure,
    TokenIds,
    TokenizeRequest,
)
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure, fields, words
from tests.service.running_service import Service

NAN, INF = math.nan, math.inf
V = INFO.vocab_size


def with_(**options: object) -> GenerateRequest:
    return GenerateRequest(text="x", **options)  # type: ignore[arg-type]


def sampling(**options: object) -> GenerateRequest:
    return with_(sampling=SamplingOptions(**options))  # type: ignore[arg-type]


def stopping(**options: object) -> GenerateRequest:
    return with_(stopping=StoppingOptions(**options))  # type: ignore[arg-type]


def output(**options: object) -> GenerateRequest:
    return with_(output=OutputOptions(**options))  # type: ignore[arg-type]


UNKNOWN_FIELD = with_()
UNKNOWN_FIELD.MergeFromString(b"\x98\x06\x01")  # field 99
UNKNOWN_SAMPLING_FIELD = GenerateRequest.FromString(with_().SerializeToString() + b"\x22\x03\x98\x06\x01")

BAD = {
    "neither prompt": (GenerateRequest(), "prompt"),
    "empty text": (GenerateRequest(text=""), "text"),
    "empty ids": (GenerateRequest(token_ids=TokenIds()), "token_ids.ids"),
    "text over the context": (GenerateRequest(text="x" * INFO.context_length), "text"),
    "ids over the context": (GenerateRequest(token_ids=TokenIds(ids=[1] * INFO.context_length)), "token_ids.ids"),
    "text over its bytes": (GenerateRequest(text="é" * (LIMITS.prompt_text_bytes // 2 + 1)), "text"),
    "id out of range": (GenerateRequest(token_ids=TokenIds(ids=[1, V])), "token_ids.ids[1]"),
    "id of 32 bits": (GenerateRequest(token_ids=TokenIds(ids=[2**32 - 1])), "token_ids.ids[0]"),
    "empty request id": (with_(request_id=""), "request_id"),
    "long request id": (with_(request_id="r" * 129), "request_id"),
    "request id with a line break": (with_(request_id="r\n"), "request_id"),
    "NaN temperature": (sampling(temperature=NAN), "sampling.temperature"),
    "infinite temperature": (sampling(temperature=INF), "sampling.temperature"),
    "negative temperature": (sampling(temperature=-0.1), "sampling.temperature"),
    "temperature that overflows": (sampling(temperature=1e-30), "sampling.temperature"),
    "negative top_k": (sampling(top_k=-1), "sampling.top_k"),
    "top_p of 0": (sampling(top_p=0.0), "sampling.top_p"),
    "top_p over 1": (sampling(top_p=1.5), "sampling.top_p"),
    "NaN top_p": (sampling(top_p=NAN), "sampling.top_p"),
    "negative min_p": (sampling(min_p=-0.5), "sampling.min_p"),
    "min_p over 1": (sampling(min_p=1.5), "sampling.min_p"),
    "NaN min_p": (sampling(min_p=NAN), "sampling.min_p"),
    "repetition penalty of 0": (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    "negative repetition penalty": (sampling(repetition_penalty=-1.0), "sampling.repetition_penalty"),
    "repetition penalty below its bound": (sampling(repetition_penalty=0.0099), "sampling.repetition_penalty"),
    "repetition penalty above its bound": (sampling(repetition_penalty=100.5), "sampling.repetition_penalty"),
    "NaN repetition penalty": (sampling(repetition_penalty=NAN), "sampling.repetition_penalty"),
    "infinite repetition penalty": (sampling(repetition_penalty=INF), "sampling.repetition_penalty"),
    "presence penalty above its bound": (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    "NaN presence penalty": (sampling(presence_penalty=NAN), "sampling.presence_penalty"),
    "infinite presence penalty": (sampling(presence_penalty=-INF), "sampling.presence_penalty"),
    "frequency penalty below its bound": (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    "NaN frequency penalty": (sampling(frequency_penalty=NAN), "sampling.frequency_penalty"),
    "infinite frequency penalty": (sampling(frequency_penalty=INF), "sampling.frequency_penalty"),
    "bias id out of range": (sampling(logit_bias={V: 1.0}), f"sampling.logit_bias[{V}]"),
    "NaN bias": (sampling(logit_bias={7: NAN}), "sampling.logit_bias[7]"),
    "bias out of range": (sampling(logit_bias={7: 101.0}), "sampling.logit_bias[7]"),
    "too many biases": (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
    "allowed id out of range": (sampling(allowed_token_ids=[1, V]), "sampling.allowed_token_ids[1]"),
    "more allowed ids than there are": (sampling(allowed_token_ids=[1] * (V + 1)), "sampling.allowed_token_ids"),
    "an empty structure": (with_(structure=Structure()), "structure"),
    "an empty schema": (with_(structure=Structure(json_schema="")), "structure.json_schema"),
    "an empty expression": (with_(structure=Structure(regex="")), "structure.regex"),
    "an empty grammar": (with_(structure=Structure(grammar="")), "structure.grammar"),
    "an empty grammar in EBNF": (with_(structure=Structure(ebnf="")), "structure.ebnf"),
    "a long schema": (with_(structure=Structure(json_schema=" " * ((1 << 17) + 1))), "structure.json_schema"),
    "a long grammar": (with_(structure=Structure(grammar="é" * (1 << 17))), "structure.grammar"),
    "no object": (with_(structure=Structure(json_object=False)), "structure.json_object"),
    "a choice of nothing": (with_(structure=Structure(choice=Choice())), "structure.choice.texts"),
    "a choice of no text": (
        with_(structure=Structure(choice=Choice(texts=["a", ""]))),
        "structure.choice.texts[1]",
    ),
    "a long choice": (with_(structure=Structure(choice=Choice(texts=["a" * 1025]))), "structure.choice.texts[0]"),
    "many choices": (with_(structure=Structure(choice=Choice(texts=["a"] * 1025))), "structure.choice.texts"),
    "much to choose": (with_(structure=Structure(choice=Choice(texts=["a" * 1024] * 129))), "structure.choice.texts"),
    "a structure that would not end": (
        with_(structure=Structure(regex="a"), stopping=StoppingOptions(ignore_eos=True)),
        "stopping.ignore_eos",
    ),
    "nothing left to draw": (
        with_(
            sampling=SamplingOptions(allowed_token_ids=[256, 9]),
            stopping=StoppingOptions(min_tokens=1, stop_token_ids=[9]),
        ),
        "sampling.allowed_token_ids",
    ),
    "no tokens": (stopping(max_tokens=0), "stopping.max_tokens"),
    "too many tokens": (stopping(max_tokens=LIMITS.max_tokens + 1), "stopping.max_tokens"),
    "negative min_tokens": (stopping(min_tokens=-1), "stopping.min_tokens"),
    "min_tokens over max_tokens": (stopping(max_tokens=2, min_tokens=3), "stopping.min_tokens"),
    "min_tokens over the default": (stopping(min_tokens=257), "stopping.min_tokens"),
    "too many stop strings": (stopping(stop=["x"] * 17), "stopping.stop"),
    "empty stop string": (stopping(stop=["x", ""]), "stopping.stop[1]"),
    "long stop string": (stopping(stop=["é" * 129]), "stopping.stop[0]"),
    "too many stop ids": (stopping(stop_token_ids=range(17)), "stopping.stop_token_ids"),
    "stop id out of range": (stopping(stop_token_ids=[V]), "stopping.stop_token_ids[0]"),
    "too many top tokens": (output(logprobs=21), "output.logprobs"),
    "negative top tokens": (output(logprobs=-1), "output.logprobs"),
    "too many top tokens of the prompt": (output(prompt_logprobs=21), "output.prompt_logprobs"),
    "negative top tokens of the prompt": (output(prompt_logprobs=-1), "output.prompt_logprobs"),
    "no tokens a message": (output(max_tokens_per_message=0), "output.max_tokens_per_message"),
    "too many tokens a message": (output(max_tokens_per_message=1025), "output.max_tokens_per_message"),
    "long salt": (with_(cache_salt="s" * 129), "cache_salt"),
    "priority out of range": (with_(priority=1001), "priority"),
    "special tokens around ids": (
        GenerateRequest(token_ids=TokenIds(ids=[1]), add_special_tokens=True),
        "add_special_tokens",
    ),
    "unknown field": (UNKNOWN_FIELD, "99"),
    "unknown sampling field": (UNKNOWN_SAMPLING_FIELD, "sampling.99"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("engine") / "engine.sock"
    with Service(FakeEngine(path), path) as running:
        yield running


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_named_by_its_path_and_never_reaches_the_engine(shared: Service, case: str) -> None:
    request, field = BAD[case]
    error = failure(lambda: list(shared.stub.Generate(request, timeout=TIMEOUT_S)))
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error) == [field]
    assert words(error).startswith(field)
    assert shared.engine.submitted.empty()


def test_generate_once_refuses_the_same_fields(shared: Service) -> None:
    request = GenerateOnceRequest(text="x", sampling=SamplingOptions(top_p=2.0), request_id="r-7")
    error = failure(lambda: shared.stub.GenerateOnce(request, timeout=TIMEOUT_S))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["sampling.top_p"])
    bounded = GenerateOnceRequest(text="x", output=OutputOptions(max_tokens_per_message=1))
    error = failure(lambda: shared.stub.GenerateOnce(bounded, timeout=TIMEOUT_S))
    assert fields(error) == ["output.max_tokens_per_message"]


def test_all_violations_are_reported_at_once(shared: Service) -> None:
    request = GenerateRequest(
        text="x", sampling=SamplingOptions(top_k=-1, top_p=0.0), stopping=StoppingOptions(max_tokens=0)
    )
    error = failure(lambda: list(shared.stub.Generate(request, timeout=TIMEOUT_S)))
    assert set(fields(error)) == {"stopping.max_tokens", "sampling.top_k", "sampling.top_p"}


@pytest.mark.parametrize(
    "request_",
    [
        sampling(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
        sampling(temperature=0.0, top_k=10**9, top_p=1.0, min_p=1.0),
        sampling(logit_bias={V - 1: -100.0}, allowed_token_ids=[3, 1, 3]),
        stopping(max_tokens=5, min_tokens=5, stop=["x"] * 16, stop_token_ids=range(16), ignore_eos=True),
        output(logprobs=20, echo=False, max_tokens_per_message=1024),
        with_(cache_salt="tenant", priority=-1000, request_id="A-z.0:9_"),
        GenerateRequest(token_ids=TokenIds(ids=[V - 1] * (INFO.context_length - 1))),
    ],
)
def test_the_edge_of_what_is_allowed_is_allowed(shared: Service, request_: GenerateRequest) -> None:
    call = shared.stub.Generate(request_, timeout=TIMEOUT_S)
    submit = shared.engine.next_submit()
    assert submit.sampling.top_k <= V
    shared.engine.output(submit.handle, [1], FinishReason.LENGTH)
    assert list(call)[-1].HasField("finished")


def test_bias_and_allowed_ids_reach_the_engine_in_order_and_once(shared: Service) -> None:
    request = sampling(logit_bias={9: 1.5, 2: -1.5}, allowed_token_ids=[9, 2, 9])
    call = shared.stub.Generate(request, timeout=TIMEOUT_S)
    submit = shared.engine.next_submit()
    assert (submit.sampling.bias_ids, submit.sampling.bias_values) == ((2, 9), (-1.5, 1.5))
    assert submit.sampling.allowed_mask == token_mask((2, 9), V).tobytes()
    call.cancel()
    shared.engine.next_cancel()


def test_a_message_over_the_limit_is_refused_by_the_transport(shared: Service) -> None:
    request = GenerateRequest(text="x" * (FrontEndSettings().max_request_bytes + 1))
    assert code(failure(lambda: list(shared.stub.Generate(request, timeout=TIMEOUT_S)))) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [("repetition_penalty", 1.0, 1.5), ("presence_penalty", 0.0, 0.5), ("frequency_penalty", 0.0, -0.5)],
)
def test_without_penalty_slots_a_penalty_is_refused_by_its_field_and_one_that_is_off_is_taken(
    name: str, off: float, on: float
) -> None:
    without = msgspec.structs.replace(INFO, penalty_slots=0)
    check_request(sampling(**{name: off}), without)
    with pytest.raises(ServiceError, match=f"sampling.{name} is not supported .* penalty_slots 0") as refused:
        check_request(sampling(**{name: on}), without)
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert check_request(sampling(**{name: on}), INFO).sampling.has_penalty


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("temperature", 1e-6),
        ("temperature", 100.0),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100.0),
        ("presence_penalty", -2.0),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("frequency_penalty", 2.0),
    ],
)
def test_a_bound_itself_is_taken_though_the_contract_carries_it_as_float32(name: str, bound: float) -> None:
    assert getattr(check_request(sampling(**{name: bound}), INFO).sampling, name) == np.float32(bound)


def test_a_prompt_that_is_too_long_by_its_count_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "fromiter", None)
    with pytest.raises(ServiceError, match="leaves room for a prompt of"):
        check_request(GenerateRequest(token_ids=TokenIds(ids=[1] * INFO.context_length)), INFO)


def test_a_request_full_of_unknown_fields_is_refused_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "UnknownFieldSet", None)
    request = GenerateRequest.FromString(with_().SerializeToString() + b"\x98\x06\x01" * 2000)
    with pytest.raises(ServiceError, match="request has 6000 bytes of fields that are not supported"):
        check_request(request, INFO)


def test_of_several_unknown_fields_some_are_named() -> None:
    numbers = b"".join(bytes([0x80 | (number << 3 & 0x7F), number >> 4, 1]) for number in range(99, 199))
    request = GenerateRequest.FromString(with_().SerializeToString() + numbers * 2)
    with pytest.raises(ServiceError, match="99 is the number of a field that this server does not know") as refused:
        check_request(request, INFO)
    named = [violation.field for violation in refused.value.details[0].field_violations]  # type: ignore[attr-defined]
    assert named == [*map(str, range(99, 99 + LIMITS.list_violations)), "request"], "each once"


def test_an_unknown_field_of_a_chat_s_message_is_named() -> None:
    message = ChatMessage(role="user", content="x").SerializeToString() + b"\x98\x06\x01"
    chat = Chat(messages=[ChatMessage(role="user"), ChatMessage.FromString(message)])
    with pytest.raises(ServiceError) as refused:
        check_request(GenerateRequest(chat=chat), INFO)
    (violation,) = refused.value.details[0].field_violations  # type: ignore[attr-defined]
    assert violation.field == "chat.messages[1].99"


@pytest.mark.parametrize(
    "method", ["GenerateOnce", "Abort", "Stats", "GetModelInfo", "Tokenize", "Detokenize", "RenderChat"]
)
def test_a_field_of_a_newer_contract_is_refused_by_every_method(shared: Service, method: str) -> None:
    call: Any = shared.channel.unary_unary(f"/runahead.v1.GenerationService/{method}")
    error = failure(lambda: call(b"\x98\x06\x01", timeout=TIMEOUT_S))  # field 99
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error)[0] == "99"


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("runahead.v1.GenerationService/Generate", "unary_stream"),
        ("runahead.v1.GenerationService/GenerateOnce", "unary_unary"),
        ("runahead.v1.GenerationService/Stats", "unary_unary"),
        ("grpc.health.v1.Health/Check", "unary_unary"),
        ("grpc.health.v1.Health/Watch", "unary_stream"),
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
def test_bytes_that_are_no_message_are_an_invalid_argument_and_no_error_of_the_server(
    shared: Service, method: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = getattr(shared.channel, kind)("/" + method)
    garbage = b"\xff\xff\xff"
    if kind == "unary_unary":
        error = failure(lambda: call(garbage, timeout=TIMEOUT_S))
    else:
        error = failure(lambda: list(call(iter([garbage]) if kind == "stream_stream" else garbage, timeout=TIMEOUT_S)))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["request"])
    assert detail(error, error_details_pb2.ErrorInfo).reason == "MALFORMED"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_request_id_in_use_already_exists(shared: Service) -> None:
    first = shared.stub.Generate(with_(request_id="twice"), timeout=TIMEOUT_S)
    submit = shared.engine.next_submit()
    error = failure(lambda: list(shared.stub.Generate(with_(request_id="twice"), timeout=TIMEOUT_S)))
    assert code(error) == grpc.StatusCode.ALREADY_EXISTS
    assert detail(error, error_details_pb2.RequestInfo).request_id == "twice"
    shared.engine.output(submit.handle, [1], FinishReason.LENGTH)
    assert list(first)[-1].HasField("finished"), "the first one is not disturbed"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (AbortRequest(), "request_ids"),
        (AbortRequest(request_ids=["a"], all=True), "all"),
        (AbortRequest(request_ids=["a"] * 1025), "request_ids"),
        (AbortRequest(request_ids=["a", "b c"]), "request_ids[1]"),
    ],
)
def test_a_bad_abort_is_refused(shared: Service, request_: AbortRequest, field: str) -> None:
    error = failure(lambda: shared.stub.Abort(request_, timeout=TIMEOUT_S))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


def test_bad_ids_and_texts_are_refused_by_the_tokenizer_calls_too(shared: Service) -> None:
    error = failure(lambda: shared.stub.Detokenize(DetokenizeRequest(token_ids=[0, V]), timeout=TIMEOUT_S))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["token_ids[1]"])
    long = TokenizeRequest(text="x" * (LIMITS.prompt_text_bytes + 1))
    error = failure(lambda: shared.stub.Tokenize(long, timeout=TIMEOUT_S))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["text"])


def test_a_request_for_one_answer_is_checked_as_one_for_a_stream() -> None:
    streamed = GenerateRequest(
        request_id="r",
        token_ids=TokenIds(ids=[1, 2]),
        sampling=SamplingOptions(temperature=0.5, seed=3, logit_bias={1: 2.0}),
        stopping=StoppingOptions(max_tokens=4, stop=["end"]),
        output=OutputOptions(logprobs=1, echo=True),
        cache_salt="salt",
        priority=-5,
        add_special_tokens=False,
    )
    once = GenerateOnceRequest.FromString(streamed.SerializeToString())
    assert {field.name for field, _ in once.ListFields()} == {field.name for field, _ in streamed.ListFields()}
    checked, expected = check_request(once, INFO), check_request(streamed, INFO)
    assert isinstance(checked.prompt, np.ndarray) and checked.prompt.tolist() == [1, 2]
    assert replace(checked, prompt="") == replace(expected, prompt="")
