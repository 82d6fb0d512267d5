"""Over the wire: what a call holds, until when, and what those are told who are not let in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from google.rpc import error_details_pb2

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.errors import PUSHBACK_HEADER
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.call_tables import Resource
from runahead.v1 import (
    DetokenizeRequest,
    GenerateOnceRequest,
    GenerateRequest,
    GetModelInfoRequest,
    StatsRequest,
    TokenIds,
    TokenizeRequest,
)
from tests.service.calls.test_access import ALICE, BOB, bearer, reason, secured
from tests.service.calls.test_admission import LIMITED
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.raw_http2 import DATA, RST_STREAM, RawClient
from tests.service.rpc_errors import code, detail, failure
from tests.service.running_service import Service


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[Service]:
    path = folder / "engine.sock"
    chosen = msgspec.structs.replace(LIMITED, **settings)
    with Service(FakeEngine(path), path, settings=chosen, max_streams=chosen.max_streams) as running:
        yield running


def ids(count: int) -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=[1] * count))


def opened(service: Service, request: GenerateRequest, metadata: Any = None) -> Any:
    """A stream that the engine has queued."""
    call = service.stub.Generate(request, timeout=TIMEOUT_S, metadata=metadata)
    assert next(call).HasField("accepted")
    return call


def refused(service: Service, request: GenerateRequest) -> Any:
    return failure(lambda: list(service.stub.Generate(request, timeout=TIMEOUT_S)))


def test_a_refusal_says_which_limit_whose_and_when_to_come_back(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        streams = [opened(service, ids(1)) for _ in range(3)]
        for method, request in (("Generate", ids(1)), ("GenerateOnce", GenerateOnceRequest(text="x"))):
            call: Any = getattr(service.stub, method)
            error: Any = failure(lambda call=call, request=request: list(call(request, timeout=TIMEOUT_S)))  # type: ignore[misc]
            assert (code(error), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLER_STREAMS_LIMIT")
            (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
            assert (violation.subject, violation.quota_id) == ("caller", "max_caller_streams")
            delay = detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
            assert dict(error.trailing_metadata())[PUSHBACK_HEADER] == str(delay)
            assert delay >= 100
        board = service.front_end.servicer._board
        assert board.refusals() == {"CALLER_STREAMS_LIMIT": 2}
        assert board.total().refused == 2
        service.engine.output(service.engine.next_submit().handle, [1], FinishReason.LENGTH)
        assert list(streams[0])[-1].HasField("finished")
        opened(service, ids(1))


def test_a_place_that_is_not_there_is_refused_before_the_request_is_read(tmp_path: Path) -> None:
    with served(tmp_path) as service, RawClient(service.port) as client:
        streams = [opened(service, ids(1)) for _ in range(3)]
        stream = client.begin("Generate")
        assert b"completions are open" in client.status_of(stream).payload
        assert len(streams) == 3


def test_tokens_are_queued_from_admission_until_the_request_has_a_row(tmp_path: Path) -> None:
    with served(tmp_path, max_caller_queued_tokens=100) as service:
        first = opened(service, ids(60))
        error = refused(service, ids(50))
        assert reason(error) == "CALLER_QUEUED_TOKENS_LIMIT"
        service.engine.send(m.Admitted(service.engine.next_submit().handle, 0, 0.0))
        service.engine.output(1, [1])
        assert next(first).HasField("delta")
        second = opened(service, ids(50))
        assert reason(refused(service, ids(60))) == "CALLER_QUEUED_TOKENS_LIMIT"
        second.cancel()
        service.engine.next_submit()
        service.engine.next_cancel()
        opened(service, ids(60))


def test_a_text_counts_as_its_bytes_until_it_is_known_how_many_tokens_it_has(tmp_path: Path) -> None:
    """`he` and `ll` are tokens: 40 bytes are 24."""
    with served(tmp_path, max_caller_queued_tokens=64) as service:
        stream = opened(service, GenerateRequest(text="hello " * 6))
        held = service.front_end.servicer._board.held.in_all()
        assert held[Resource.QUEUED_TOKENS] == len(np.frombuffer(service.engine.next_submit().prompt, np.int32)) < 36
        assert held[Resource.TOKENIZING_BYTES] == 0
        assert reason(refused(service, GenerateRequest(text="x" * 60))) == "CALLER_QUEUED_TOKENS_LIMIT"
        stream.cancel()


def test_work_for_the_tokenizer_is_counted_whichever_method_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    with served(tmp_path) as service:
        tokenizer: Any = service.front_end.servicer._texts._tokenizer
        encode = tokenizer._encode

        def late(text: str, add_special_tokens: bool) -> Any:
            go_on.wait(TIMEOUT_S)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "_encode", late)
        monkeypatch.setattr("runahead.service.text.tokenizer._INLINE_CHARACTERS", 10)
        stub = service.stub
        first = stub.Tokenize.future(TokenizeRequest(text="x" * 1500), timeout=TIMEOUT_S)
        held = service.front_end.servicer._board.held
        while not held.in_all()[Resource.TOKENIZING_BYTES]:
            assert not first.done()
        calls: dict[str, Any] = {
            "Tokenize": lambda: stub.Tokenize(TokenizeRequest(text="y" * 600), timeout=TIMEOUT_S),
            "one of many short ones": lambda: stub.Tokenize(TokenizeRequest(text="y"), timeout=TIMEOUT_S),
            "Detokenize": lambda: stub.Detokenize(DetokenizeRequest(token_ids=[1] * 200), timeout=TIMEOUT_S),
            "Generate": lambda: list(stub.Generate(GenerateRequest(text="y" * 600), timeout=TIMEOUT_S)),
            "GenerateOnce": lambda: stub.GenerateOnce(GenerateOnceRequest(text="y" * 600), timeout=TIMEOUT_S),
        }
        for call in calls.values():
            assert reason(failure(call)) == "CALLER_TOKENIZING_LIMIT"
        go_on.set()
        assert len(first.result().token_ids) == 1500
        for name in ("Tokenize", "Detokenize"):
            calls[name]()


def test_uploads_have_a_limit_and_control_is_never_kept_out_by_work(tmp_path: Path) -> None:
    with served(tmp_path) as service, RawClient(service.port) as client:
        streams = [client.begin(method) for method in ("Generate", "GenerateOnce", "Tokenize", "Detokenize")]
        table = service.front_end.servicer._board.held
        while table.in_all()[Resource.UPLOADS] < 4:
            service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        error = failure(lambda: service.stub.Tokenize(TokenizeRequest(text="x"), timeout=TIMEOUT_S))
        assert (reason(error), code(error)) == ("CALLER_UPLOADS_LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end.open_streams == 0
        client.message(streams[2], TokenizeRequest(text="x").SerializeToString(), ends=True)
        client.frames_until(DATA, streams[2])
        assert service.stub.Tokenize(TokenizeRequest(text="x"), timeout=TIMEOUT_S).token_ids
        control = [client.begin("Stats") for _ in range(5)]
        assert b"calls have not sent their whole request" in client.status_of(control[-1]).payload
        for stream in streams[:2]:
            client.send(RST_STREAM, b"\0\0\0\x08", stream=stream)
        while table.in_all()[Resource.UPLOADS] > 1:
            service.stub.Tokenize(TokenizeRequest(text="x"), timeout=TIMEOUT_S)


def test_a_drain_tells_its_reason_also_where_no_place_is_free(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        stream = opened(service, ids(1))
        others = [opened(service, ids(1)) for _ in range(2)]
        service.stop(TIMEOUT_S)
        service.engine.output(service.engine.next_submit().handle, [1])
        next(stream)
        while reason(error := refused(service, ids(1))) == "CALLER_STREAMS_LIMIT":
            pass  # until the front end has heard of it
        assert (reason(error), code(error)) == ("SHUTDOWN", grpc.StatusCode.UNAVAILABLE)
        for call in (stream, *others):
            call.cancel()


def test_named_callers_have_half_each_by_default_and_one_never_keeps_the_other_out(tmp_path: Path) -> None:
    service = secured(tmp_path, FrontEndSettings())
    service.max_streams = 4
    with service:
        alices = [opened(service, ids(1), bearer(ALICE)) for _ in range(2)]
        error: Any = failure(lambda: opened(service, ids(1), bearer(ALICE)))
        assert reason(error) == "CALLER_STREAMS_LIMIT"
        assert detail(error, error_details_pb2.QuotaFailure).violations[0].subject == "caller:alice"
        bobs = [opened(service, ids(1), bearer(BOB)) for _ in range(2)]
        assert len(alices) == len(bobs)


def test_a_caller_who_may_have_all_is_told_of_the_service_s_limit(tmp_path: Path) -> None:
    with served(tmp_path, max_streams=1, max_caller_streams=0) as service:
        stream = opened(service, ids(1))
        error = refused(service, ids(1))
        assert reason(error) == "STREAMS_LIMIT"
        (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
        assert (violation.subject, violation.quota_id) == ("server", "max_streams")
        stream.cancel()


def test_the_engine_s_full_queue_is_refused_with_its_setting(service: Service) -> None:
    calls = [opened(service, ids(1)) for _ in range(INFO.max_queue)]
    error = refused(service, ids(1))
    assert reason(error) == "QUEUE_FULL"
    (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
    assert (violation.subject, violation.quota_id, violation.quota_value) == ("server", "max_queue", INFO.max_queue)
    assert service.front_end.servicer._board.refusals() == {"QUEUE_FULL": 1}
    assert len(calls) == INFO.max_queue
