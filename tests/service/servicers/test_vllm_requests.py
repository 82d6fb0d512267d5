"""What routers ask for: each field is mapped, or refused by its name, and none is passed over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.servicers.vllm_messages import generate_request
from runahead.v1 import Choice, Structure
from tests.service.fake_engine import INFO
from tests.service.rpc_errors import code, failure, fields, words
from tests.service.running_service import Service
from tests.service.vllm_calls import generate, ids, request, served


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with served(tmp_path) as running:
        yield running


def refusal(service: Service, asked: Any) -> Any:
    error = failure(lambda: list(generate(service, asked)))
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert service.engine.submitted.empty()
    return error


def submitted(service: Service, asked: Any) -> m.Submit:
    call = generate(service, asked)
    submit = service.engine.next_submit()
    service.engine.output(submit.handle, [], FinishReason.LENGTH)
    list(call)
    return submit


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 0.0}, "temperature", 0.0),
        ({}, "temperature", 1.0),
        ({"top_p": 0.25}, "top_p", 0.25),
        ({}, "top_p", 1.0),
        ({"top_k": 7}, "top_k", 7),
        ({"top_k": 2**32 - 1}, "top_k", INFO.vocab_size),
        ({"min_p": 0.125}, "min_p", 0.125),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"presence_penalty": -0.5}, "presence_penalty", -0.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({}, "repetition_penalty", 1.0),
        ({"seed": 7}, "seed", 7),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"logprobs": 2}, "logprobs", 2),
        ({}, "logprobs", -1),
        ({"prompt_logprobs": 1}, "prompt_logprobs", 1),
        ({"logit_bias": {5: -2.0, 3: 1.5}}, "bias_ids", (3, 5)),
        ({"logit_bias": {5: -2.0, 3: 1.5}}, "bias_values", (1.5, -2.0)),
        ({"max_tokens": 9}, "max_tokens", 9),
        ({}, "max_tokens", INFO.context_length),
        ({"min_tokens": 4}, "min_tokens", 4),
        ({"stop_token_ids": [8, 7]}, "stop_token_ids", (7, 8)),
        ({"ignore_eos": True}, "ignore_eos", True),
    ],
)
def test_each_parameter_reaches_the_engine(service: Service, params: Any, field: str, value: Any) -> None:
    call = generate(service, request(**params))
    submit = service.engine.next_submit()
    call.cancel()
    assert getattr(submit.stopping if hasattr(submit.stopping, field) else submit.sampling, field) == value


def test_the_prompt_is_the_ids_or_the_text(service: Service) -> None:
    assert submitted(service, request()).prompt == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    text = submitted(service, pb.GenerateRequest(text="once"))
    assert len(text.prompt) == 4 * len(ids("once")) and len(text.request_id) == 32, "the server makes an id"


UNSUPPORTED = [
    (pb.SamplingParams(n=17), "sampling_params.n"),
    (pb.SamplingParams(json_schema=""), "sampling_params.json_schema"),
    (pb.SamplingParams(regex="a" * ((1 << 17) + 1)), "sampling_params.regex"),
    (pb.SamplingParams(grammar=""), "sampling_params.grammar"),
    (pb.SamplingParams(structural_tag="a"), "sampling_params.structural_tag"),
    (pb.SamplingParams(json_object=False), "sampling_params.json_object"),
    (pb.SamplingParams(choice=pb.ChoiceConstraint()), "sampling_params.choice.choices"),
    (pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["a", ""])), "sampling_params.choice.choices[1]"),
    (pb.SamplingParams(regex="a", ignore_eos=True), "sampling_params.ignore_eos"),
    (pb.SamplingParams(truncate_prompt_tokens=-1), "sampling_params.truncate_prompt_tokens"),
    (pb.SamplingParams(grammar_from_first_token=True), "sampling_params.grammar_from_first_token"),
    (pb.SamplingParams(stop=["a"]), "sampling_params.skip_special_tokens"),
    (pb.SamplingParams(logit_bias={-3: 1.0}), "sampling_params.logit_bias[-3]"),
    (pb.SamplingParams(logit_bias={300: 1.0}), "sampling_params.logit_bias[300]"),
    (pb.SamplingParams(top_p=2.0), "sampling_params.top_p"),
    (pb.SamplingParams(logprobs=-1), "sampling_params.logprobs"),
    (pb.SamplingParams(max_tokens=0), "sampling_params.max_tokens"),
    (pb.SamplingParams(max_tokens=2**32 - 1), "sampling_params.max_tokens"),
    (pb.SamplingParams(min_tokens=2**32 - 1), "sampling_params.min_tokens"),
    (pb.SamplingParams(stop_token_ids=[300]), "sampling_params.stop_token_ids[0]"),
    (pb.SamplingParams(stop=[""], skip_special_tokens=True), "sampling_params.stop[0]"),
    (pb.GenerateRequest(kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params"),
    (pb.GenerateRequest(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
    (pb.GenerateRequest(mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
    (pb.GenerateRequest(extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
    (pb.GenerateRequest(media_refs=pb.MediaRefs()), "media_refs"),
    (pb.GenerateRequest(data_parallel_rank=1), "data_parallel_rank"),
    (pb.GenerateRequest(request_id="no id"), "request_id"),
    (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[300])), "tokenized.input_ids[0]"),
    (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids"),
]


@pytest.mark.parametrize(("changed", "named"), UNSUPPORTED, ids=[named for _, named in UNSUPPORTED])
def test_what_is_not_supported_is_refused_by_its_name(service: Service, changed: Any, named: str) -> None:
    asked = request()
    if isinstance(changed, pb.SamplingParams):
        asked.sampling_params.CopyFrom(changed)
    else:
        asked.MergeFrom(changed)
        if named.startswith("tokenized"):
            asked.tokenized.CopyFrom(changed.tokenized)
    error = refusal(service, asked)
    assert fields(error) == [named]
    assert words(error).startswith(named)


def test_a_request_without_a_prompt_and_one_with_an_unknown_field_are_refused(service: Service) -> None:
    assert fields(refusal(service, pb.GenerateRequest())) == ["input"]
    unknown = pb.GenerateRequest.FromString(request().SerializeToString() + b"\xa0\x06\x01")
    assert fields(refusal(service, unknown)) == ["100"]


# What says how tokens become text, of which none is answered; how it is answered; and what other fields are in.
NO_EFFECT = {
    "sampling_params.skip_special_tokens",
    "sampling_params.spaces_between_special_tokens",
    "sampling_params.include_stop_str_in_output",  # of stop strings, which the front end finds
    "stream",
    "sampling_params",
    "tokenized",
}


STRUCTURES = {f"sampling_params.{name}" for name in ("json_schema", "json_object", "regex", "grammar")}
STOP = "sampling_params.stop", "sampling_params.skip_special_tokens"  # which has to be set with it


def one_value(field: FieldDescriptor) -> Any:
    message: Any = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return {1: 1.0}
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        made = getattr(pb, message.name)()
        return [made] if field.is_repeated else made
    value: Any = {
        FieldDescriptor.TYPE_STRING: "a",
        FieldDescriptor.TYPE_BOOL: True,
        FieldDescriptor.TYPE_FLOAT: 0.5,
    }.get(field.type, 2)
    return [value] if field.is_repeated else value


def asked_of_the_engine(service: Service, asked: Any) -> tuple[Any, ...] | str:
    """What the engine gets, or the field that is refused; of a structure, the sentence by which this engine's are."""
    call = generate(service, asked)
    while service.engine.submitted.empty():
        if call.done():
            error = failure(lambda: list(call))
            return words(error) if code(error) == grpc.StatusCode.FAILED_PRECONDITION else fields(error)[0]
        time.sleep(0.001)
    submit = service.engine.next_submit()
    call.cancel()
    for _ in range(submit.n):
        service.engine.next_cancel()
    return submit.request_id, submit.prompt, submit.sampling, submit.stopping, submit.n


def test_no_field_of_a_request_is_passed_over(service: Service) -> None:
    """Each alone changes what the engine is asked for, or is refused by its name."""
    inner, outer = pb.SamplingParams.DESCRIPTOR.fields, pb.GenerateRequest.DESCRIPTOR.fields
    base = asked_of_the_engine(service, request(seed=1))
    passed_over = set()
    for path, field in [(f"sampling_params.{f.name}", f) for f in inner] + [(f.name, f) for f in outer]:
        changed = request(seed=1)
        where = changed.sampling_params if path.startswith("sampling_params.") else changed
        where.MergeFrom(type(where)(**{field.name: one_value(field)}))
        asked = asked_of_the_engine(service, changed)
        if isinstance(asked, str):
            no_structure = path in STRUCTURES and asked.startswith("this server takes no structure")
            assert asked.startswith(path) or (path, asked) == STOP or no_structure
        elif asked == base:
            passed_over.add(path)
    assert passed_over == NO_EFFECT


def test_the_length_of_the_prompt_is_bounded_as_ours(service: Service) -> None:
    asked = request()
    asked.tokenized.input_ids.extend([1] * INFO.context_length)
    assert fields(refusal(service, asked)) == ["tokenized.input_ids"]
    service.engine.auto_accept = False
    call = generate(service)
    refused = m.Refused(service.engine.next_submit().handle, "INVALID_ARGUMENT", "no room", "stopping.max_tokens")
    service.engine.send(refused)
    assert fields(failure(lambda: list(call))) == ["sampling_params.max_tokens"]


@pytest.mark.parametrize(
    ("asked", "structure"),
    [
        (pb.SamplingParams(json_schema="{}"), Structure(json_schema="{}")),
        (pb.SamplingParams(json_object=True), Structure(json_object=True)),
        (pb.SamplingParams(regex="a"), Structure(regex="a")),
        (pb.SamplingParams(grammar='root ::= "a"'), Structure(ebnf='root ::= "a"')),
        (pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["a", "b"])), Structure(choice=Choice(texts=["a", "b"]))),
    ],
)
def test_what_an_answer_must_be_is_the_same_in_both_contracts(asked: Any, structure: Structure) -> None:
    ours = generate_request(pb.GenerateRequest(text="a", sampling_params=asked), 10)
    assert ours.structure == structure
