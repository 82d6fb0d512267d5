"""Slow readers, full queues, a dead engine, a shutdown: each stream ends once, with a status, and the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.errors import INTERNAL_SENTENCE
from runahead.service.engine.request_stream import RequestRefusedError, RequestStream
from runahead.v1 import (
    GenerateOnceRequest,
    GenerateRequest,
    GenerationServiceStub,
    OutputOptions,
    StatsRequest,
    StoppingOptions,
    TokenizeRequest,
)
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure, fields, words
from tests.service.running_service import Service
from tests.service.small_tokenizers import byte_level_tokenizer, panicking_tokenizer


def request(**options: object) -> GenerateRequest:
    return GenerateRequest(text="once", **options)  # type: ignore[arg-type]


def test_a_dead_engine_ends_every_stream_once_with_unavailable(service: Service) -> None:
    calls = [service.stub.Generate(request(), timeout=TIMEOUT_S) for _ in range(3)]
    once = service.stub.GenerateOnce.future(GenerateOnceRequest(text="once"), timeout=TIMEOUT_S)
    for call in calls:
        next(call)
    for _ in range(4):
        service.engine.next_submit()
    service.engine.die()
    for ended in [lambda call=call: list(call) for call in calls] + [once.result]:
        error = failure(ended)
        assert code(error) == grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_LOST"
    assert code(failure(lambda: list(service.stub.Generate(request(), timeout=TIMEOUT_S)))) == (
        grpc.StatusCode.UNAVAILABLE
    ), "a new call is answered, too"
    assert code(failure(lambda: service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S))) == grpc.StatusCode.UNAVAILABLE


def test_an_engine_that_fails_says_why_in_the_details(service: Service) -> None:
    call = service.stub.Generate(request(request_id="r-9"), timeout=TIMEOUT_S)
    next(call)
    service.engine.send(m.Failed("DEVICE", "the device failed"))
    error = failure(lambda: list(call))
    assert (code(error), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the device failed")
    assert detail(error, error_details_pb2.ErrorInfo).reason == "DEVICE"
    assert detail(error, error_details_pb2.RequestInfo).request_id == "r-9"


def test_an_engine_that_speaks_nonsense_is_lost(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    next(call)
    service.engine.send(m.Hello(1))  # type: ignore[arg-type]
    error = failure(lambda: list(call))
    assert code(error) == grpc.StatusCode.UNAVAILABLE
    assert service.engine.gone.wait(TIMEOUT_S), "the front end closes its end"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.NON_FINITE, grpc.StatusCode.INTERNAL),
        (FinishReason.NOTHING_LEFT, grpc.StatusCode.FAILED_PRECONDITION),
        (FinishReason.STRUCTURE_COST, grpc.StatusCode.FAILED_PRECONDITION),
        (FinishReason.STRUCTURE_MISMATCH, grpc.StatusCode.INTERNAL),
        (FinishReason.STRUCTURE_LOST, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_request_that_the_engine_gives_up_fails_with_its_status_and_no_other(
    service: Service, reason: FinishReason, status: grpc.StatusCode
) -> None:
    failing = service.stub.Generate(request(), timeout=TIMEOUT_S)
    failing_submit = service.engine.next_submit()
    other = service.stub.Generate(request(), timeout=TIMEOUT_S)
    other_submit = service.engine.next_submit()
    service.engine.output(failing_submit.handle, [], reason)
    service.engine.output(other_submit.handle, [1], FinishReason.LENGTH)
    assert code(failure(lambda: list(failing))) == status
    assert list(other)[-1].HasField("finished")


@pytest.mark.parametrize("together", [True, False])
def test_what_was_said_before_a_request_was_given_up_is_delivered_before_its_status(
    service: Service, together: bool
) -> None:
    """However tokens and the end come together, and what waits for the rest of a stop string too."""
    ids = byte_level_tokenizer().encode("ab").ids
    call = service.stub.Generate(request(stopping=StoppingOptions(stop=["bc"])), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    if not together:
        service.engine.output(handle, ids)
    service.engine.output(handle, ids if together else [], FinishReason.NOTHING_LEFT)
    events = []
    error = failure(lambda: events.extend(call))
    assert code(error) == grpc.StatusCode.FAILED_PRECONDITION
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert [token.id for delta in deltas for token in delta.tokens] == ids
    assert "".join(delta.text for delta in deltas) == "ab"
    assert not any(event.HasField("finished") for event in events)


def test_a_stop_string_in_what_was_said_before_a_request_was_given_up_ends_it(service: Service) -> None:
    call = service.stub.Generate(request(stopping=StoppingOptions(stop=["b"])), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    service.engine.output(handle, byte_level_tokenizer().encode("ab").ids, FinishReason.NON_FINITE)
    *_, last = call
    assert last.finished.stop.text == "b"


def test_a_slow_reader_is_ended_and_cancelled_while_its_neighbour_goes_on(service: Service) -> None:
    slow = service.stub.Generate(request(output=OutputOptions(logprobs=20)), timeout=60)
    slow_submit = service.engine.next_submit()
    top = (tuple(range(20)), tuple(-float(i) for i in range(20)))
    neighbour = service.stub.Generate(request(), timeout=60)
    neighbour_submit = service.engine.next_submit()
    while service.engine.cancelled.empty():  # nobody reads: the transport fills, then the buffer
        service.engine.output(slow_submit.handle, [1] * 200, logprobs=[m.Logprobs(i, -1.0, *top) for i in range(200)])
    assert service.engine.next_cancel() == slow_submit.handle
    service.engine.output(neighbour_submit.handle, [1], FinishReason.LENGTH)
    assert list(neighbour)[-1].HasField("finished")
    error = failure(lambda: list(slow))
    assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo) is None
    stats = service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end
    assert (stats.slow_readers, stats.open_streams) == (1, 0)


@pytest.mark.parametrize("what", ["the engine is lost", "the buffer overflows"])
def test_nothing_follows_the_end_of_a_completion_that_a_stop_string_ended(service: Service, what: str) -> None:
    """The reader is slow, so that the end waits to be written while more happens."""
    stopped = request(stopping=StoppingOptions(stop=["b"]), output=OutputOptions(logprobs=20, max_tokens_per_message=4))
    a, b = (byte_level_tokenizer().encode(letter).ids[0] for letter in "ab")
    top = (tuple(range(20)), tuple(-float(i) for i in range(20)))
    logprobs = [m.Logprobs(i, -1.0, *top) for i in range(371)]
    no_probe = [("grpc.http2.bdp_probe", 0)]  # it would let the server send more than is read
    with grpc.insecure_channel(f"127.0.0.1:{service.port}", no_probe) as channel:
        call = GenerationServiceStub(channel).Generate(stopped, timeout=30)
        handle = service.engine.next_submit().handle
        service.engine.output(handle, [*[a] * 370, b], logprobs=logprobs)
        assert service.engine.next_cancel() == handle, "the engine is told before anything is read"
        if what == "the engine is lost":
            service.engine.die()
        else:
            for _ in range(3):
                service.engine.output(handle, [a] * 371, logprobs=logprobs)
        events = [event.WhichOneof("event") for event in call]
    assert events == ["accepted", *["delta"] * 93, "finished"]


def test_refusals_of_the_engine_are_counted_too(service: Service) -> None:
    service.engine.auto_accept = False
    for refusal in ("RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "INVALID_ARGUMENT"):
        call = service.stub.Generate(request(), timeout=TIMEOUT_S)
        service.engine.send(m.Refused(service.engine.next_submit().handle, refusal, "no", "request_id"))
        assert code(failure(lambda call=call: list(call))).name == refusal  # type: ignore[misc]
    stats = service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end
    assert stats.refused == 3


def test_a_request_that_never_fits_names_the_field_that_the_engine_names(service: Service) -> None:
    service.engine.auto_accept = False
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    service.engine.send(m.Refused(handle, "INVALID_ARGUMENT", "the cache holds 64 tokens", "stopping.max_tokens"))
    error = failure(lambda: list(call))
    assert fields(error) == ["stopping.max_tokens"]
    assert error.details() == "stopping.max_tokens is too large: the cache holds 64 tokens"


def test_a_full_queue_is_exhausted_with_the_time_to_try_again(service: Service) -> None:
    queued = [service.stub.Generate(request(), timeout=TIMEOUT_S) for _ in range(INFO.max_queue)]
    for call in queued:
        next(call)
    error = failure(lambda: list(service.stub.Generate(request(), timeout=TIMEOUT_S)))
    assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0


def test_streams_over_the_limit_are_refused_before_the_engine_sees_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("engine") / "engine.sock"
    with Service(FakeEngine(path), path, max_streams=1) as service:
        open_call = service.stub.Generate(request(), timeout=TIMEOUT_S)
        service.engine.next_submit()
        error = failure(lambda: list(service.stub.Generate(request(), timeout=TIMEOUT_S)))
        assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo) is not None
        assert service.engine.submitted.empty()
        open_call.cancel()
        service.engine.next_cancel()
        next(service.stub.Generate(request(), timeout=TIMEOUT_S))


def test_an_unforeseen_error_is_a_fixed_sentence_without_the_prompt(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str, add_special_tokens: bool) -> None:
        raise ValueError(f"could not tokenize {text}")

    monkeypatch.setattr(service.front_end.servicer._texts._tokenizer, "_encode", broken)
    secret = GenerateRequest(text="the secret", request_id="r-1")
    error = failure(lambda: list(service.stub.Generate(secret, timeout=TIMEOUT_S)))
    assert (code(error), error.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_SENTENCE)
    assert detail(error, error_details_pb2.RequestInfo).request_id == "r-1"
    logged = capsys.readouterr()
    assert "call_failed" in logged.out + logged.err and "r-1" in logged.out + logged.err
    assert "secret" not in logged.out + logged.err


def test_a_graceful_stop_lets_a_stream_finish_and_refuses_new_calls(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    next(call)
    ready = HealthCheckRequest(service="runahead.v1.GenerationService")
    watch = HealthStub(service.channel).Watch(ready, timeout=TIMEOUT_S)
    assert next(watch).status == HealthCheckResponse.SERVING
    service.stop(grace_s=TIMEOUT_S)
    assert next(watch).status == HealthCheckResponse.NOT_SERVING
    refused = failure(lambda: list(service.stub.Generate(request(), timeout=TIMEOUT_S)))
    assert code(refused) == grpc.StatusCode.UNAVAILABLE
    service.engine.output(submit.handle, [1], FinishReason.LENGTH)
    assert list(call)[-1].HasField("finished")


def test_what_is_open_when_the_grace_is_over_ends_with_shutdown(service: Service) -> None:
    call = service.stub.Generate(request(), timeout=TIMEOUT_S)
    next(call)
    service.stop(grace_s=0.0)
    error = failure(lambda: list(call))
    assert code(error) == grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.ErrorInfo).reason == "SHUTDOWN"


def test_a_panic_of_the_tokenizer_ends_the_call_with_internal_and_no_other(tmp_path: Path) -> None:
    text, path = "a" * 40, tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, tokenizer=panicking_tokenizer()) as service:
        for call in (
            lambda: list(service.stub.Generate(GenerateRequest(text=text), timeout=TIMEOUT_S)),
            lambda: service.stub.GenerateOnce(GenerateOnceRequest(text=text), timeout=TIMEOUT_S),
            lambda: service.stub.Tokenize(TokenizeRequest(text=text), timeout=TIMEOUT_S),
        ):
            error = failure(call)
            assert (code(error), error.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_SENTENCE)
        assert len(service.stub.Tokenize(TokenizeRequest(text="word"), timeout=TIMEOUT_S).token_ids) == 4


class Panic(BaseException):
    """As a panic in the Rust code of a library is raised."""


def test_what_a_library_raises_that_is_no_exception_ends_a_call_with_internal(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object) -> None:
        raise Panic

    monkeypatch.setattr(service.front_end.servicer._texts, "prompt", panic)
    error = failure(lambda: list(service.stub.Generate(request(), timeout=TIMEOUT_S)))
    assert (code(error), error.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_SENTENCE)


def test_a_refusal_that_meets_a_cancellation_is_a_refusal(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(stream: RequestStream) -> None:
        stream.fail(RequestRefusedError("RESOURCE_EXHAUSTED", "8 requests are waiting", ""))
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    monkeypatch.setattr(RequestStream, "accepted", refused)
    error = failure(lambda: list(service.stub.Generate(GenerateRequest(text="once"), timeout=TIMEOUT_S)))
    assert (code(error), words(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "8 requests are waiting")
