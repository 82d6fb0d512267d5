"""One line in the log for each call, whatever becomes of it, with all that is known and nothing that was said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.admission import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.log.library_lines import LineBudget
from runahead.service.servers.supervised import Security
from runahead.service.settings.settings import FrontEndSettings
from runahead.v1 import (
    AbortRequest,
    GenerateOnceRequest,
    GenerateRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    OutputOptions,
    StoppingOptions,
    TokenizeRequest,
)
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.log_lines import Line, LogLines, log_lines
from tests.service.rpc_errors import failure
from tests.service.running_service import Service
from tests.service.small_tokenizers import byte_level_tokenizer

ALICE = "alice-token-0123456789"
KNOWN = {"level", "event", "method", "peer", "x_request_id", "trace_id", "total_s", "code"}  # of every call
COMPLETION = {
    "request_id",
    "prompt_tokens",
    "completion_tokens",
    "waited_for",
    "waited_s",
}  # of one that the engine was asked for


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with log_lines() as taken:
        yield taken


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text).ids


def generate(service: Service, **options: Any) -> Any:
    return service.stub.Generate(GenerateRequest(text="once", request_id="r-1", **options), timeout=TIMEOUT_S)


def without_times(line: Line) -> Line:
    others = ("total_s", "waited_s", "peer", "x_request_id", "trace_id")
    return {name: value for name, value in line.items() if name not in others}


def test_a_completion_that_finished_has_one_line_with_everything(service: Service, lines: LogLines) -> None:
    call = generate(service)
    handle = service.engine.next_submit().handle
    service.engine.output(handle, ids("hello"), FinishReason.LENGTH, cached_tokens=3)
    list(call)
    line = lines.call("Generate")
    assert without_times(line) == {
        "level": "info",
        "event": "call",
        "method": "/runahead.v1.GenerationService/Generate",
        "code": "OK",
        "request_id": "r-1",
        "prompt_tokens": len(ids("once")),
        "finish": "LENGTH",
        "completion_tokens": len(ids("hello")),
        "cached_tokens": 3,
        "queue_s": 0.25,
        "first_token_s": 0.75,
        "waited_for": "tokenizer",
    }
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert line["total_s"] > 0
    assert lines.rest() == []


def test_a_completion_that_lacked_blocks_or_prompt_tokens_says_how_often(service: Service, lines: LogLines) -> None:
    call = generate(service)
    handle = service.engine.next_submit().handle
    end = m.Finished(handle, int(FinishReason.LENGTH), evictions=2, pauses=7, chunks_deferred=4)
    tokens = np.array(ids("hello"), np.int32)
    handles = np.full(tokens.size, handle, np.int64)
    service.engine.send(m.Output(1, handles.tobytes(), tokens.tobytes(), (), (end,)))
    list(call)
    line = lines.call("Generate")
    assert (line["evictions"], line["pauses"], line["chunks_deferred"]) == (2, 7, 4)


def test_a_unary_completion_has_the_same_line(service: Service, lines: LogLines) -> None:
    request = GenerateOnceRequest(text="once", request_id="r-2", stopping=StoppingOptions(stop=["l"]))
    call = service.stub.GenerateOnce.future(request, timeout=TIMEOUT_S)
    service.engine.output(service.engine.next_submit().handle, ids("hello"), FinishReason.LENGTH)
    response = call.result()
    line = lines.call("GenerateOnce")
    assert (line["request_id"], line["finish"], line["code"]) == ("r-2", "STOP", "OK")
    assert line["completion_tokens"] == len(response.tokens) > 0


@pytest.mark.parametrize("phase", ["waiting", "decoding"])
def test_a_completion_that_was_cancelled_says_how_far_it_came(service: Service, lines: LogLines, phase: str) -> None:
    call = generate(service)
    handle = service.engine.next_submit().handle
    next(call)
    if phase == "decoding":
        service.engine.send(m.Admitted(handle, 2, 0.5))
        service.engine.output(handle, ids("hello"))
        next(call)
    call.cancel()
    line = lines.call("Generate")
    assert (line["level"], line["code"], "finish" in line) == ("info", "CANCELLED", False)
    told = {name: line.get(name) for name in ("completion_tokens", "cached_tokens", "queue_s")}
    if phase == "decoding":
        assert told == {"completion_tokens": len(ids("hello")), "cached_tokens": 2, "queue_s": 0.5}
        assert line["first_token_s"] >= 0
    else:
        assert told == {"completion_tokens": 0, "cached_tokens": None, "queue_s": None}
        assert "first_token_s" not in line


def test_a_deadline_that_passed_is_told_from_a_cancellation(service: Service, lines: LogLines) -> None:
    failure(lambda: list(service.stub.Generate(GenerateRequest(text="once"), timeout=0.2)))
    assert lines.call("Generate")["code"] == "DEADLINE_EXCEEDED"


def test_a_completion_that_the_engine_failed_has_the_reason_and_its_tokens(service: Service, lines: LogLines) -> None:
    call = generate(service)
    service.engine.output(service.engine.next_submit().handle, ids("hello"))
    next(call), next(call)
    service.engine.send(m.Failed("DEVICE", "the device failed"))
    failure(lambda: list(call))
    line = lines.call("Generate")
    assert (line["code"], line["reason"], line["level"]) == ("UNAVAILABLE", "DEVICE", "info")
    assert line["completion_tokens"] == len(ids("hello"))


def test_a_shutdown_leaves_a_line_of_every_completion_that_it_met(service: Service, lines: LogLines) -> None:
    call = generate(service)
    next(call)
    service.stop(grace_s=0.0)
    failure(lambda: list(call))
    line = lines.call("Generate")
    assert (line["code"], line["reason"], line["request_id"]) == ("UNAVAILABLE", "SHUTDOWN", "r-1")


@pytest.mark.parametrize(
    ("request_of", "expected"),
    [
        ({"request_id": "r-3", "output": OutputOptions(logprobs=99)}, ("INVALID_ARGUMENT", "INVALID_FIELD", None)),
        ({"request_id": "not an id"}, ("INVALID_ARGUMENT", "INVALID_FIELD", None)),
        ({"request_id": "taken"}, ("ALREADY_EXISTS", "DUPLICATE_ID", "taken")),
    ],
)
def test_a_completion_that_was_refused_has_a_line_and_no_id_that_is_none(
    service: Service, lines: LogLines, request_of: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    taken = service.stub.Generate(GenerateRequest(text="once", request_id="taken"), timeout=TIMEOUT_S)
    next(taken)
    failure(lambda: list(service.stub.Generate(GenerateRequest(text="once", **request_of), timeout=TIMEOUT_S)))
    line = lines.call("Generate")
    assert (line["code"], line["reason"], line.get("request_id")) == expected
    assert line["level"] == "info" and set(line) <= KNOWN | COMPLETION | {"reason"}
    taken.cancel()


def test_other_methods_have_a_line_at_debug_and_at_info_where_they_are_refused(
    service: Service, lines: LogLines
) -> None:
    service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
    line = lines.call("GetModelInfo")
    assert (line["level"], line["code"], set(line)) == ("debug", "OK", KNOWN)
    HealthStub(service.channel).Check(HealthCheckRequest(), timeout=TIMEOUT_S)
    assert lines.call("Check")["level"] == "debug"
    failure(lambda: HealthStub(service.channel).Check(HealthCheckRequest(service="nobodys"), timeout=TIMEOUT_S))
    assert lines.call("Check")["code"] == "NOT_FOUND"
    failure(lambda: service.stub.Abort(AbortRequest(), timeout=TIMEOUT_S))
    line = lines.call("Abort")
    assert (line["level"], line["reason"]) == ("info", "INVALID_FIELD")


def test_without_the_setting_no_call_has_a_line(tmp_path: Path, lines: LogLines) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, settings=FrontEndSettings(request_log=False)) as service:
        service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        failure(lambda: list(service.stub.Generate(GenerateRequest(), timeout=TIMEOUT_S)))
    assert [line for line in lines.rest() if line["event"] == "call"] == []


def test_a_line_names_the_caller_and_never_its_token(tmp_path: Path, lines: LogLines) -> None:
    file = tmp_path / "callers"
    file.write_text(f"alice generate token {ALICE}\n")
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, security=Security(Access(CallersFile(file)), None)) as service:
        bearer = [("authorization", f"Bearer {ALICE}")]
        service.stub.Tokenize(TokenizeRequest(text="x"), timeout=TIMEOUT_S, metadata=bearer)
        assert lines.call("Tokenize")["caller"] == "alice"
        failure(lambda: service.stub.Abort(AbortRequest(), timeout=TIMEOUT_S, metadata=bearer))
        assert lines.call("Abort")["caller"] == "alice"
        all_of_it = str(lines.rest())
        failure(lambda: service.stub.Tokenize(TokenizeRequest(), metadata=[("authorization", "Bearer wrong-token")]))
        line = lines.call("Tokenize")
        assert (line["code"], line["reason"], "caller" in line) == ("UNAUTHENTICATED", "UNKNOWN_CREDENTIALS", False)
    assert ALICE not in all_of_it and "wrong-token" not in str(line)


def test_calls_that_bring_no_request_can_not_fill_the_log(service: Service, lines: LogLines) -> None:
    """Each costs its sender a few bytes. What is left out is counted (`LineBudget`)."""
    name = "x" * 5000
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        method: Any = channel.unary_unary(f"/{name}/{name}")
        calls = [method.future(b"", timeout=TIMEOUT_S) for _ in range(500)]
        for call in calls:
            assert call.exception() is not None
        GenerationServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
    found = []
    while not (line := lines.next("call"))["method"].endswith("GetModelInfo"):
        found.append(line)
    assert {line["reason"] for line in found} == {"NOT_SERVED"}
    assert 0 < len(found) <= 200, "one hundred in ten seconds"
    assert max(len(line["method"]) for line in found) == 100


def test_what_a_budget_leaves_out_is_told_with_the_next_line_of_its_kind() -> None:
    now = 0.0
    budget = LineBudget(2, 10.0, clock=lambda: now)
    assert [budget.take("a") for _ in range(5)] == [0, 0, None, None, None]
    assert budget.take("b") == 0, "another kind has lines of its own"
    now = 9.9
    assert budget.take("a") is None
    now = 10.0
    assert [budget.take("a") for _ in range(3)] == [4, 0, None]


def test_a_kind_whose_time_is_over_makes_room_for_another_and_what_it_left_out_is_counted() -> None:
    now = [0.0]
    budget = LineBudget(1, 10.0, clock=lambda: now[0])
    for _ in range(3):
        for kind in range(256):
            budget.take(str(kind))
    assert [budget.take("new") for _ in range(2)] == [0, None], "by the shared kind"
    now[0] = 10.0
    assert [budget.take("new") for _ in range(2)] == [0, None], "by its own"
    assert [budget.take(f"of the rest {kind}") for kind in range(256)].count(2 * 256 + 1) == 1


def test_a_budget_has_so_many_kinds_and_one_for_the_rest() -> None:
    budget = LineBudget(1, 10.0, clock=lambda: 0.0)
    assert [budget.take(str(kind)) for kind in range(300)].count(0) == 257
