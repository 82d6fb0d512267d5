"""Every error has a reason and the status of the table, names every field that is wrong, and says when to come back."""

from __future__ import annotations

import ast
import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.runtime.wire.messages import Logprobs
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.errors import (
    ERROR_DOMAIN,
    INTERNAL_SENTENCE,
    PUSHBACK_HEADER,
    STATUS_OF,
    ServiceError,
    given_up,
    to_status,
    unknown_fields,
)
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.wire_faults import wire_faults
from runahead.v1 import (
    AbortRequest,
    GenerateRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    OutputOptions,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
    TokenIds,
    TokenizeRequest,
    WatchStatsRequest,
)
from tests.project.repository import ROOT, parsed, sources
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure, fields, words
from tests.service.running_service import Service

CONTRACT = (ROOT / "protos/runahead/v1/generation_service.proto").read_text(encoding="utf-8")
V = INFO.vocab_size
WHOLE = GenerateRequest(
    request_id="r1",
    token_ids=TokenIds(ids=[1, 300, 70_000]),
    sampling=SamplingOptions(
        temperature=0.5, top_k=3, seed=2**63, logit_bias={7: 1.0, 300: -1.0}, allowed_token_ids=[5]
    ),
    stopping=StoppingOptions(max_tokens=5, stop=["é", "ab"], ignore_eos=True),
    output=OutputOptions(logprobs=2),
    cache_salt="ü",
    priority=-1,
).SerializeToString()
GENERATE = "/runahead.v1.GenerationService/Generate"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("engine") / "engine.sock"
    with Service(FakeEngine(path), path) as running:
        yield running


def generate_failure(service: Service, data: bytes) -> grpc.RpcError:
    """How a call ends that sends these bytes."""
    call: Any = service.channel.unary_stream(GENERATE)
    return failure(lambda: list(call(data, timeout=TIMEOUT_S)))


def reason(error: grpc.RpcError) -> str:
    info = detail(error, error_details_pb2.ErrorInfo)
    assert info.domain == ERROR_DOMAIN
    return str(info.reason)


def test_the_contract_lists_every_reason_beside_its_status() -> None:
    lines = re.findall(r"^// - ([A-Z_]+): (.+)$", CONTRACT, re.MULTILINE)
    listed = {name: {grpc.StatusCode[status]} for status, names in lines for name in re.findall(r"[A-Z_]{4,}", names)}
    assert listed == {name: {status} for name, status in STATUS_OF.items()}


def test_no_error_is_raised_for_a_reason_that_the_table_does_not_have() -> None:
    raised = {
        call.args[0].value
        for path in sources("service")
        for call in ast.walk(parsed(path))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("ServiceError", "exhausted")
        if isinstance(call.args[0], ast.Constant)
    }
    assert len(raised) > 5
    assert raised <= STATUS_OF.keys()


def test_a_reason_that_only_a_newer_engine_knows_is_unavailable() -> None:
    assert to_status(ServiceError("MELTED", "too hot")).code == grpc.StatusCode.UNAVAILABLE


def test_where_no_token_is_left_the_sentence_names_what_may_forbid_them() -> None:
    """A bias is not among it: it is bounded, as docs/structured-output.md says."""
    error = given_up(FinishReason.NOTHING_LEFT)
    assert error is not None and "allowed_token_ids" in error.sentence and "min_tokens" in error.sentence
    assert "bias" not in error.sentence


def test_every_wrong_field_is_named_and_the_error_fits_into_the_metadata_that_a_client_takes(shared: Service) -> None:
    nan = math.nan
    request = GenerateRequest(
        request_id="no id " * 1000,
        token_ids=TokenIds(ids=[2**32 - 1 - i for i in range(INFO.context_length - 1)]),
        sampling=SamplingOptions(
            temperature=-1e30, top_k=-(2**31), top_p=nan, min_p=nan, repetition_penalty=nan, presence_penalty=-3e38,
            frequency_penalty=3e38, logit_bias={2**32 - 1 - i: nan for i in range(1024)},
            allowed_token_ids=[2**32 - 1 - i for i in range(V)],
        ),
        stopping=StoppingOptions(
            max_tokens=-(2**31), min_tokens=-1, stop=[""] * 16, stop_token_ids=[2**32 - 1 - i for i in range(16)]
        ),
        output=OutputOptions(logprobs=-(2**31), prompt_logprobs=-(2**31), max_tokens_per_message=-(2**31)),
        cache_salt="s" * 129,
        priority=-(2**31),
    )  # fmt: skip
    request.MergeFromString(b"".join(bytes([0x80 | (n << 3 & 0x7F), n >> 4, 1]) for n in range(90, 120)))
    error = failure(lambda: list(shared.stub.Generate(request, timeout=TIMEOUT_S)))
    assert (code(error), reason(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    named = {re.sub(r"\[\d+\]", "", field) for field in fields(error)} - {"90", "91", "92", "request"}
    assert named == {
        "request_id", "token_ids.ids", "cache_salt", "priority",
        *(f"sampling.{field.name}" for field in SamplingOptions.DESCRIPTOR.fields if field.name != "seed"),
        *(f"stopping.{name}" for name in ("max_tokens", "min_tokens", "stop", "stop_token_ids")),
        *(f"output.{name}" for name in ("logprobs", "prompt_logprobs", "max_tokens_per_message")),
    }  # fmt: skip
    assert len(fields(error)) < LIMITS.violations, "none was left out"


def test_of_a_long_list_some_wrong_entries_are_named_and_the_others_counted(shared: Service) -> None:
    ids = [V + i if i % 2 else 1 for i in range(20)]
    error = failure(lambda: list(shared.stub.Generate(GenerateRequest(token_ids=TokenIds(ids=ids)), timeout=TIMEOUT_S)))
    assert fields(error) == [*(f"token_ids.ids[{i}]" for i in (1, 3, 5)), "token_ids.ids"]
    last = detail(error, error_details_pb2.BadRequest).field_violations[-1]
    assert last.description == "token_ids.ids has 7 more such entries"
    names = ["fine", "not fine", "fine-too", "ö"]
    error = failure(lambda: shared.stub.Abort(AbortRequest(request_ids=names), timeout=TIMEOUT_S))
    assert fields(error) == ["request_ids[1]", "request_ids[3]"]


def entry_of_bias(data: bytes) -> bytes:
    """A request with these bytes as an entry of the bias."""
    sampling = b"\x4a" + bytes([len(data)]) + data
    return b"\x12\x01x\x22" + bytes([len(sampling)]) + sampling


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\x0a\x02\xff\xfe", ["request_id"]),
        (b"\x12\x03a\xffb\x3a\x01\xff", ["text", "cache_salt"]),
        (b"\x12\x01x\x2a\x08\x1a\x01a\x1a\x03\xff\xffa", ["stopping.stop[1]"]),
        (b"\x1a\x04\x0a\x02\x80\x80", ["token_ids.ids"]),
        (b"\x1a\x0d\x0a\x0b" + b"\x80" * 10 + b"\x01", ["token_ids.ids"]),
        (b"\x1a\x09\x0a\x02\x80\x80", ["token_ids"]),
        (b"\x12\x01x\x22\x04\x52\x02\x01\x80", ["sampling.allowed_token_ids"]),
        (b"\x12\x01x\x22\x03\x0d\x00\x00", ["sampling.temperature"]),
        (entry_of_bias(b"\x08\x07\x15\x00\x00"), ["sampling.logit_bias[0].value"]),
        (b"\x12\x01x\x07", ["request"]),
        (b"\x12\x01x\x00\x00", ["request"]),
    ],
)
def test_malformed_bytes_are_named_by_the_path_of_the_field_that_holds_them(
    shared: Service, data: bytes, named: list[str]
) -> None:
    error = generate_failure(shared, data)
    assert (code(error), reason(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED")
    assert fields(error) == named
    assert words(error).startswith(named[0])


def test_a_malformed_message_of_a_million_fields_is_not_looked_through(shared: Service) -> None:
    data = b"\x40\x01" * 1_000_000 + b"\x12\x02\xff\xff"
    error = generate_failure(shared, data)
    assert fields(error) == ["request"]
    assert "too much to be looked through" in words(error)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (entry_of_bias(b"\x08\x07\x15\x00\x00\x80\x3f\x98\x06\x01"), "sampling.logit_bias[7].99"),
        (b"\x12\x01x\x22\x02\x18\x01", "sampling.top_p"),  # a number of another kind where top_p belongs
        (b"\x12\x01x\x22\x02\x48\x01", "sampling.logit_bias"),
    ],
)
def test_unknown_fields_in_lists_and_fields_of_another_type_are_named(shared: Service, data: bytes, named: str) -> None:
    error = generate_failure(shared, data)
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [named])
    assert shared.engine.submitted.empty()


def test_a_full_queue_says_which_limit_it_is_and_when_to_come_back(service: Service) -> None:
    calls = [service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S) for _ in range(INFO.max_queue)]
    for call in calls:
        next(call)
    error: Any = failure(lambda: list(service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)))
    assert (code(error), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
    assert violation.subject == "server" and str(INFO.max_queue) in violation.description
    delay = detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
    assert dict(error.trailing_metadata())[PUSHBACK_HEADER] == str(delay)
    assert detail(error, error_details_pb2.RequestInfo).request_id


@pytest.mark.parametrize("method", ["WatchStats", "Generate"])
def test_what_trying_again_does_not_help_says_nothing_of_when(shared: Service, method: str) -> None:
    request = {"WatchStats": WatchStatsRequest(interval=Duration()), "Generate": GenerateRequest()}[method]
    error: Any = failure(lambda: list(getattr(shared.stub, method)(request, timeout=TIMEOUT_S)))
    assert reason(error) == "INVALID_FIELD"
    assert detail(error, error_details_pb2.RetryInfo) is None
    assert PUSHBACK_HEADER not in dict(error.trailing_metadata())


def test_a_call_without_a_request_id_that_fails_unexpectedly_is_given_one_for_the_log(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runahead.service.stats.stats.server_stats", None)
    error = failure(lambda: service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S))
    assert (code(error), error.details(), reason(error)) == (grpc.StatusCode.INTERNAL, INTERNAL_SENTENCE, "UNEXPECTED")
    request_id = detail(error, error_details_pb2.RequestInfo).request_id
    logged = capsys.readouterr()
    assert request_id and request_id in logged.out + logged.err


def test_a_shutdown_ends_every_call_that_it_meets_with_its_reason(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that wait for the engine, for a thread, for the client, and for nothing."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str, add_special_tokens: bool) -> object:
        begun.set()
        go_on.wait(TIMEOUT_S)
        raise ValueError(text)

    monkeypatch.setattr(service.front_end.servicer._tokenizer, "_encode", slow)
    monkeypatch.setattr(service.front_end.servicer._tokenizer, "longest_token_bytes", None)  # as if any text might fit
    service.engine.answers_stats = False
    service.engine.auto_accept = False
    long = "x" * 5000
    stats = service.stub.Stats.future(StatsRequest(), timeout=TIMEOUT_S)
    tokenize = service.stub.Tokenize.future(TokenizeRequest(text=long), timeout=TIMEOUT_S)
    assert begun.wait(TIMEOUT_S)
    tokenizing = service.stub.Generate(GenerateRequest(text=long), timeout=TIMEOUT_S)
    queued = service.stub.Generate(GenerateRequest(token_ids=TokenIds(ids=[1])), timeout=TIMEOUT_S)
    service.engine.next_submit()
    asked = threading.Event()

    def questions() -> Iterator[ServerReflectionRequest]:
        yield ServerReflectionRequest(list_services="")
        asked.wait(TIMEOUT_S)

    reflect: Any = service.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
    )
    reflection = reflect(questions(), timeout=TIMEOUT_S)
    next(reflection)
    service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)  # by now the calls above have arrived
    service.stop(grace_s=0.0)
    try:
        for ended in (stats.result, tokenize.result, *(lambda c=c: list(c) for c in (tokenizing, queued, reflection))):
            error = failure(ended)
            assert (code(error), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "SHUTDOWN")
    finally:
        asked.set()
        go_on.set()
    assert service.front_end.servicer.counters.cancelled == 0, "nobody has cancelled anything"


@given(data=st.binary(max_size=200), cuts=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=4))
@settings(deadline=None, max_examples=300)
def test_whatever_the_library_can_not_parse_has_a_field_that_is_named(
    data: bytes, cuts: list[tuple[int, bytes]]
) -> None:
    """Random bytes, and a message with some of its bytes replaced."""
    whole = bytearray(WHOLE)
    for at, new in cuts:
        whole[at % len(whole) : at % len(whole) + len(new)] = new
    for candidate in (data, bytes(whole)):
        try:
            message = GenerateRequest.FromString(candidate)
        except DecodeError:
            found = wire_faults(GenerateRequest.DESCRIPTOR, candidate, LIMITS.violations)
            assert 0 < len(found) <= LIMITS.violations
            assert all(fault.field and fault.sentence for fault in found)
        else:
            if not unknown_fields(message, 1000):
                found = wire_faults(GenerateRequest.DESCRIPTOR, candidate, LIMITS.violations)
                assert [fault.field for fault in found] == ["request"], "nothing is wrong with any field"


def test_a_shutdown_tells_its_reason_to_a_slow_reader_too(service: Service) -> None:
    """Whose stream is stuck in a write when the grace is over."""
    options = OutputOptions(logprobs=20, max_tokens_per_message=4)
    top = (tuple(range(20)), tuple(-float(i) for i in range(20)))
    no_probe = [("grpc.http2.bdp_probe", 0)]  # it would let the server send more than is read
    with grpc.insecure_channel(f"127.0.0.1:{service.port}", no_probe) as channel:
        call = GenerationServiceStub(channel).Generate(GenerateRequest(text="x", output=options), timeout=30)
        handle = service.engine.next_submit().handle
        next(call)
        service.engine.output(handle, [1] * 371, logprobs=[Logprobs(i, -1.0, *top) for i in range(371)])
        next(call)
        service.stop(grace_s=0.0)
        error = failure(lambda: list(call))
    assert (code(error), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "SHUTDOWN")
