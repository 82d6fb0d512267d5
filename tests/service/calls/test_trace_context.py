"""`x-request-id` and `traceparent`: taken where they are well formed, made where they are not, and given back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.call import SAMPLED, TraceContext, trace_context
from runahead.v1 import AbortRequest, GenerateRequest, GetModelInfoRequest, WatchStatsRequest
from tests.service.fake_engine import TIMEOUT_S
from tests.service.log_lines import LogLines, log_lines
from tests.service.raw_http2 import DATA, RawClient
from tests.service.rpc_errors import detail, failure
from tests.service.running_service import Service

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = (("x-request-id", "job-7/step@3"), ("traceparent", f"00-{TRACE}-{PARENT}-01"))
MADE = re.compile(r"[0-9a-f]{32}")
TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-(00|01)")


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with log_lines() as taken:
        yield taken


def headers(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if key in ("x-request-id", "traceparent")}


def check_given_back(found: dict[str, str]) -> None:
    assert found["x-request-id"] == "job-7/step@3"
    parent = TRACEPARENT.fullmatch(found["traceparent"])
    assert parent is not None and parent[1] == TRACE and parent[3] == "01"
    assert parent[2] != PARENT, "the call is a span of its own"


def test_what_a_client_gives_comes_back_with_a_streams_first_message_and_stands_in_the_log(
    service: Service, lines: LogLines
) -> None:
    call = service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S, metadata=GIVEN)
    service.engine.output(service.engine.next_submit().handle, [1], FinishReason.LENGTH)
    list(call)
    check_given_back(headers(call.initial_metadata()))
    line = lines.call("Generate")
    assert (line["x_request_id"], line["trace_id"]) == ("job-7/step@3", TRACE)


def test_what_a_client_gives_comes_back_with_a_unary_answer(service: Service) -> None:
    _, call = service.stub.GetModelInfo.with_call(GetModelInfoRequest(), timeout=TIMEOUT_S, metadata=GIVEN)
    check_given_back(headers(call.initial_metadata()))


def test_a_stream_of_figures_has_them_too(service: Service) -> None:
    call = service.stub.WatchStats(WatchStatsRequest(), timeout=TIMEOUT_S, metadata=GIVEN)
    next(call)
    check_given_back(headers(call.initial_metadata()))
    call.cancel()


def test_an_error_has_them_in_its_details_and_its_only_headers(service: Service, lines: LogLines) -> None:
    """An answer that is an error has no headers but its last, or clients would not try it again by themselves."""
    error: Any = failure(lambda: service.stub.Abort(AbortRequest(), timeout=TIMEOUT_S, metadata=GIVEN))
    assert headers(error.initial_metadata()) == {}
    found = headers(error.trailing_metadata())
    check_given_back(found)
    info = detail(error, error_details_pb2.RequestInfo)
    assert info.request_id == "job-7/step@3"
    assert info.serving_data == f"x-request-id=job-7/step@3 traceparent={found['traceparent']}"
    assert lines.call("Abort")["x_request_id"] == "job-7/step@3"


def test_the_error_of_a_completion_has_its_own_id_beside_the_headers(service: Service) -> None:
    request = GenerateRequest(text="x", request_id="taken")
    taken = service.stub.Generate(request, timeout=TIMEOUT_S)
    next(taken)
    error = failure(lambda: list(service.stub.Generate(request, timeout=TIMEOUT_S, metadata=GIVEN)))
    info = detail(error, error_details_pb2.RequestInfo)
    assert info.request_id == "taken"
    assert info.serving_data.startswith("x-request-id=job-7/step@3 ")
    taken.cancel()


def test_a_client_that_is_not_let_in_has_them_too(service: Service) -> None:
    method: Any = service.channel.unary_unary("/nobody.Nothing/Does")
    error = failure(lambda: method(b"", timeout=TIMEOUT_S, metadata=GIVEN))
    assert detail(error, error_details_pb2.RequestInfo).request_id == "job-7/step@3"


def test_a_call_without_headers_is_given_some(service: Service, lines: LogLines) -> None:
    seen = set()
    for _ in range(2):
        _, call = service.stub.GetModelInfo.with_call(GetModelInfoRequest(), timeout=TIMEOUT_S)
        found = headers(call.initial_metadata())
        parent = TRACEPARENT.fullmatch(found["traceparent"])
        assert parent is not None and MADE.fullmatch(found["x-request-id"])
        line = lines.call("GetModelInfo")
        assert (line["x_request_id"], line["trace_id"]) == (found["x-request-id"], parent[1])
        seen |= {found["x-request-id"], parent[1], parent[2]}
    assert len(seen) == 6, "each is its own"


@pytest.mark.parametrize(
    "bad",
    ["", "two words", "x" * 129, "semi;colon", 'quo"te', "{}"],
)
def test_a_bad_request_id_is_replaced_and_the_call_is_served(service: Service, bad: str) -> None:
    _, call = service.stub.GetModelInfo.with_call(
        GetModelInfoRequest(), timeout=TIMEOUT_S, metadata=[("x-request-id", bad)]
    )
    assert MADE.fullmatch(headers(call.initial_metadata())["x-request-id"])


def test_headers_that_are_no_text_are_replaced_and_the_call_is_served(service: Service, lines: LogLines) -> None:
    with RawClient(service.port) as client:
        stream = client.begin("GetModelInfo", dict.fromkeys(("x-request-id", "traceparent"), "��"))
        client.message(stream, b"", ends=True)
        client.frames_until(DATA, stream)  # the answer
    assert MADE.fullmatch(lines.call("GetModelInfo")["x_request_id"])


@pytest.mark.parametrize(
    "bad",
    [
        "",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0g",
        f"01-{TRACE}-{PARENT}-01more",
        f"01-{TRACE}-{PARENT}-01-{'x' * 300}",
    ],
)
def test_a_bad_traceparent_begins_a_trace_of_its_own(bad: str) -> None:
    made = trace_context([("traceparent", bad)])
    assert made.trace_id != TRACE and made.parent_id == "" and made.flags == 0
    assert TRACEPARENT.fullmatch(made.traceparent)


def test_a_later_version_may_say_more_and_unknown_flags_are_not_passed_on() -> None:
    taken = trace_context([("traceparent", f"01-{TRACE}-{PARENT}-ff-more")])
    assert (taken.trace_id, taken.parent_id, taken.flags) == (TRACE, PARENT, SAMPLED)


@pytest.mark.parametrize("header", ["x-request-id", "traceparent"])
def test_a_header_that_is_there_twice_is_none(header: str) -> None:
    value = dict(GIVEN)[header]
    once, twice = trace_context([(header, value)]), trace_context([(header, value)] * 2)
    assert (once.request_id == value) == (header == "x-request-id")
    assert twice.request_id != value and twice.trace_id != TRACE


@given(st.lists(st.tuples(st.sampled_from(["x-request-id", "traceparent", "other"]), st.text() | st.binary())))
@settings(deadline=None)
def test_whatever_the_headers_hold_what_is_made_of_them_is_well_formed(metadata: list[tuple[str, object]]) -> None:
    made = trace_context(metadata)
    assert isinstance(made, TraceContext)
    assert re.fullmatch(r"[A-Za-z0-9._:/+=@-]{1,128}", made.request_id)
    assert TRACEPARENT.fullmatch(made.traceparent)


def test_a_call_that_was_refused_is_tried_again_by_the_client_itself(service: Service) -> None:
    """gRPC's own policy: it holds for answers that have no headers but their last."""
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s", '
        '"maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNIMPLEMENTED"]}}]}'
    )
    with (
        log_lines() as lines,
        grpc.insecure_channel(f"127.0.0.1:{service.port}", [("grpc.service_config", policy)]) as channel,
    ):
        method: Any = channel.unary_unary("/nobody.Nothing/Does")
        failure(lambda: method(b"", timeout=TIMEOUT_S))
        assert [lines.call("Does")["reason"] for _ in range(3)] == ["NOT_SERVED"] * 3
