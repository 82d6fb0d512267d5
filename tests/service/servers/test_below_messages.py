"""Calls that are no whole request, and connections that are no good: each ends by itself, and no other with it."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.admission import Access
from runahead.service.credentials.tls import TlsFiles, server_credentials
from runahead.service.servers.supervised import Security
from runahead.service.settings.settings import FrontEndSettings
from runahead.v1 import (
    DetokenizeRequest,
    GenerateOnceRequest,
    GenerateRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    TokenizeRequest,
    generation_service_pb2,
)
from tests.service.certificates import Authority
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.raw_http2 import (
    ACK,
    DATA,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PING,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    RawClient,
)
from tests.service.rpc_errors import code, detail, failure
from tests.service.running_service import Service
from tests.service.small_tokenizers import byte_level_tokenizer

UPLOAD_S = 1.0  # short, and still long enough for an honest request on a machine that is busy
METHODS = [method.name for method in generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods]


@contextmanager
def served(folder: Path, security: Security | None = None, **settings: Any) -> Iterator[Service]:
    path = folder / "engine.sock"
    chosen = FrontEndSettings(**settings)
    with Service(FakeEngine(path), path, settings=chosen, security=security or Security(Access(), None)) as running:
        yield running


def outcome(service: Service, method: str, messages: Iterator[bytes]) -> tuple[str, grpc.StatusCode]:
    """Reason and status of a call with these messages."""
    call: Any = service.channel.stream_stream(f"/runahead.v1.GenerationService/{method}")
    error = failure(lambda: list(call(messages, timeout=TIMEOUT_S)))
    return str(detail(error, error_details_pb2.ErrorInfo).reason), code(error)


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_a_message_is_answered_at_once(service: Service, method: str) -> None:
    assert outcome(service, method, iter([])) == ("NO_MESSAGE", grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_message_is_refused_before_anything_is_done_for_the_first(service: Service, method: str) -> None:
    messages = iter([GenerateRequest(text="x").SerializeToString() if method == "Generate" else b""] * 2)
    assert outcome(service, method, messages) == ("SECOND_MESSAGE", grpc.StatusCode.INVALID_ARGUMENT)
    assert service.engine.submitted.empty()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("method", ["Generate", "Stats"])
def test_a_call_whose_upload_does_not_end_is_ended(tmp_path: Path, method: str, count: int) -> None:
    """Headers alone, or a message without an end."""
    with served(tmp_path, upload_timeout_s=UPLOAD_S) as service:
        go_on = threading.Event()

        def messages() -> Iterator[bytes]:
            yield from [b""] * count
            go_on.wait(TIMEOUT_S)

        try:
            assert outcome(service, method, messages()) == ("UPLOAD_TIMEOUT", grpc.StatusCode.DEADLINE_EXCEEDED)
        finally:
            go_on.set()
        assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"


def test_a_message_that_is_cut_off_is_ended_and_its_connection_serves_on(tmp_path: Path) -> None:
    with served(tmp_path, upload_timeout_s=UPLOAD_S) as service, RawClient(service.port) as client:
        stream = client.begin("Generate")
        client.message(stream, b"x" * 1000, ends=False, says=3 << 20)
        assert b"the request was not complete within 1 s" in client.status_of(stream).payload
        client.frames_until(RST_STREAM, stream)  # the rest of the upload is not taken
        whole = client.begin("GetModelInfo")
        client.message(whole, b"", ends=True)
        client.frames_until(DATA, whole)  # the answer


def test_a_reflection_stream_on_which_nothing_is_asked_ends(tmp_path: Path) -> None:
    with served(tmp_path, upload_timeout_s=0.1) as service:
        go_on = threading.Event()

        def questions() -> Iterator[bytes]:
            go_on.wait(TIMEOUT_S)
            yield from ()

        call: Any = service.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        try:
            assert code(failure(lambda: list(call(questions(), timeout=TIMEOUT_S)))) == (
                grpc.StatusCode.DEADLINE_EXCEEDED
            )
        finally:
            go_on.set()


def test_many_unfinished_calls_of_one_connection_end_and_a_bystander_is_served(tmp_path: Path) -> None:
    with served(tmp_path, upload_timeout_s=3 * UPLOAD_S) as service, RawClient(service.port) as client:
        streams = [client.begin("Generate") for _ in range(500)]
        for _ in range(20):
            assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"
        ended: set[int] = set()
        while len(ended) < len(streams):
            ended.add(client.frames_until(HEADERS)[-1].stream)
        assert ended == set(streams)
        assert service.front_end.servicer.counters.open_streams == 0


# ------------------------------------------------------------ what the library is told


def test_a_connection_has_so_many_calls_open_and_another_connection_its_own(tmp_path: Path) -> None:
    with served(tmp_path, max_connection_streams=2) as service:
        open_calls = {
            name: service.stub.Generate(GenerateRequest(text="x", request_id=name), timeout=TIMEOUT_S)
            for name in ("first", "second")
        }
        submits = [service.engine.next_submit() for _ in open_calls]
        handles = {submit.request_id: submit.handle for submit in submits}
        third = service.stub.Generate(GenerateRequest(text="x", request_id="third"), timeout=TIMEOUT_S)
        with service.connect() as channel:
            other = GenerationServiceStub(channel).Generate(
                GenerateRequest(text="x", request_id="other"), timeout=TIMEOUT_S
            )
            assert service.engine.next_submit().request_id == "other", "the third waits in its client"
            service.engine.output(handles["first"], [1], FinishReason.LENGTH)
            assert list(open_calls["first"])[-1].HasField("finished")
            assert service.engine.next_submit().request_id == "third"
            for call in (third, other, open_calls["second"]):
                call.cancel()


def test_a_client_that_opens_more_calls_than_it_may_has_them_refused(tmp_path: Path) -> None:
    with served(tmp_path, max_connection_streams=2) as service, RawClient(service.port) as client:
        client.frames_until(SETTINGS)
        client.send(SETTINGS, flags=ACK)
        streams = [client.begin("Generate") for _ in range(3)]
        refusal = client.frames_until(RST_STREAM)[-1]
        assert (refusal.stream, refusal.payload[-1]) == (streams[2], REFUSED_STREAM)


def test_a_connection_over_the_number_of_them_is_closed_and_the_others_serve_on(tmp_path: Path) -> None:
    with served(tmp_path, max_connections=2) as service, RawClient(service.port) as idle:
        assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"
        idle.frames_until(SETTINGS)
        with RawClient(service.port, greets=False) as third:
            third.wait_closed()
        assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"


def test_headers_over_their_bound_are_refused_and_others_taken(tmp_path: Path) -> None:
    with served(tmp_path, max_metadata_bytes=4096) as service:

        def ask(size: int) -> str:
            metadata = [("x-note", "n" * size)]
            answer = service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S, metadata=metadata)
            return str(answer.model)

        assert ask(3000) == "fake"
        assert code(failure(lambda: ask(4096))) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ask(3000) == "fake"


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    with served(tmp_path, handshake_timeout_s=0.1) as service, RawClient(service.port, greets=False) as client:
        client.wait_closed()


def test_a_connection_that_does_not_shake_hands_is_closed(tmp_path: Path) -> None:
    certificate, key = Authority().server().write(tmp_path, "server")
    security = Security(Access(), server_credentials(TlsFiles(certificate, key, None)))
    with served(tmp_path, security, handshake_timeout_s=0.1) as service:
        with RawClient(service.port, greets=False) as client:
            client.wait_closed()  # of a client that does not even begin
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        trusting.set_alpn_protocols(["h2"])
        with RawClient(service.port, greets=False, tls=trusting) as client:
            client.wait_closed()  # and of one that says nothing behind it


def test_a_connection_without_calls_is_closed_after_a_while_and_one_with_a_call_is_not(tmp_path: Path) -> None:
    with served(tmp_path, max_connection_idle_s=0.1) as service, RawClient(service.port) as idle:
        stream = service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
        handle = service.engine.next_submit().handle
        next(stream)
        idle.frames_until(GOAWAY)
        service.engine.output(handle, [1], FinishReason.LENGTH)
        assert list(stream)[-1].HasField("finished")


def test_an_old_connection_takes_no_more_calls_and_its_open_ones_have_a_grace(tmp_path: Path) -> None:
    with served(tmp_path, max_connection_age_s=0.2, max_connection_age_grace_s=600.0) as service:
        stream = service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
        handle = service.engine.next_submit().handle
        next(stream)
        with RawClient(service.port) as beside:  # made later: when it is told to go, the first one was
            beside.frames_until(GOAWAY)
        service.engine.output(handle, [1], FinishReason.LENGTH)
        assert list(stream)[-1].HasField("finished")


def test_the_calls_of_an_old_connection_end_with_its_grace_and_are_cancelled(tmp_path: Path) -> None:
    with served(tmp_path, max_connection_age_s=1.0, max_connection_age_grace_s=1.0) as service:
        stream = service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
        handle = service.engine.next_submit().handle
        assert code(failure(lambda: list(stream))) == grpc.StatusCode.UNAVAILABLE
        assert service.engine.next_cancel() == handle


def test_a_client_that_pings_without_end_is_sent_away(service: Service) -> None:
    with RawClient(service.port) as client:
        client.frames_until(SETTINGS)
        client.send(PING, b"12345678", times=4)  # at once: behind the fourth the connection is gone
        said = client.frames_until(GOAWAY)[-1].payload
        assert said[7] == ENHANCE_YOUR_CALM
    assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"


@pytest.mark.parametrize(("strikes", "interval_s"), [(1000, 10.0), (1, 0.001)])
def test_pings_are_as_many_and_as_often_as_the_settings_say(tmp_path: Path, strikes: int, interval_s: float) -> None:
    """Without any call, too."""
    with (
        served(tmp_path, max_ping_strikes=strikes, min_ping_interval_s=interval_s) as service,
        RawClient(service.port) as client,
    ):
        for _ in range(6):
            time.sleep(0.005)  # longer than the shorter interval
            client.send(PING, b"12345678")
            assert client.frames_until(PING)[-1].flags == ACK


def test_a_client_that_does_not_answer_when_it_is_asked_whether_it_is_there_is_given_up(tmp_path: Path) -> None:
    with served(tmp_path, keepalive_time_s=1, keepalive_timeout_s=1) as service, RawClient(service.port) as client:
        client.frames_until(SETTINGS)
        client.send(SETTINGS, flags=ACK)
        stream = client.begin("Generate")
        client.message(stream, GenerateRequest(text="x").SerializeToString(), ends=True)
        handle = service.engine.next_submit().handle
        assert client.frames_until(PING)[-1].flags == 0
        assert service.engine.next_cancel() == handle
        client.wait_closed()


def test_a_request_is_as_large_as_the_setting_says_and_clients_are_told(tmp_path: Path) -> None:
    with served(tmp_path, max_request_bytes=2048) as service:
        asked = service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        assert asked.limits.message_bytes == 2048
        assert len(service.stub.Tokenize(TokenizeRequest(text="x" * 2000), timeout=TIMEOUT_S).token_ids) == 2000
        too_long = TokenizeRequest(text="x" * 2048)
        assert code(failure(lambda: service.stub.Tokenize(too_long, timeout=TIMEOUT_S))) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )


def test_an_answer_is_as_large_as_the_setting_says(tmp_path: Path) -> None:
    with served(tmp_path, max_response_bytes=1 << 20) as service:
        (end,) = byte_level_tokenizer().encode("<|end|>").ids
        asked = DetokenizeRequest(token_ids=[end] * 200_000, include_special_tokens=True)
        assert code(failure(lambda: service.stub.Detokenize(asked, timeout=TIMEOUT_S))) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        asked = DetokenizeRequest(token_ids=[end] * 100_000, include_special_tokens=True)
        assert len(service.stub.Detokenize(asked, timeout=TIMEOUT_S).text) == 700_000


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
def test_a_completion_takes_no_longer_than_one_may(tmp_path: Path, method: str) -> None:
    with served(tmp_path, max_completion_s=0.1) as service:
        request = (GenerateRequest if method == "Generate" else GenerateOnceRequest)(text="x", request_id="mine")
        call: Any = service.channel.unary_stream(
            f"/runahead.v1.GenerationService/{method}", type(request).SerializeToString
        )
        error = failure(lambda: list(call(request, timeout=TIMEOUT_S)))
        assert (code(error), detail(error, error_details_pb2.ErrorInfo).reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "TOO_LONG",
        )
        assert detail(error, error_details_pb2.RequestInfo).request_id == "mine"
        assert service.engine.next_cancel() == service.engine.next_submit().handle
        counters = service.front_end.servicer.counters
        assert (counters.open_streams, counters.cancelled) == (0, 0), "it was the service that ended it"


@contextmanager
def stuck(service: Service) -> Iterator[None]:
    """The front end's loop looks at nothing."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(TIMEOUT_S)

    service.call(wait)
    assert begun.wait(TIMEOUT_S)
    try:
        yield
    finally:
        go_on.set()


def test_calls_that_nobody_looks_at_are_refused_when_there_are_too_many(tmp_path: Path) -> None:
    with served(tmp_path, max_pending_calls=4) as service:
        service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        with stuck(service):
            calls = [service.stub.GetModelInfo.future(GetModelInfoRequest(), timeout=TIMEOUT_S) for _ in range(40)]
            refused = threading.Event()
            for call in calls:
                call.add_done_callback(lambda _: refused.set())
            assert refused.wait(TIMEOUT_S), "while the loop is stuck"
        codes = [call.code() for call in calls]
        # The library's own code for it: no code of ours is reached.
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
        assert codes.count(grpc.StatusCode.OK) >= 4


@pytest.mark.parametrize(("pending_timeout_s", "served_late"), [(1, False), (60, True)])
def test_a_call_that_nobody_looks_at_for_too_long_is_given_up(
    tmp_path: Path, pending_timeout_s: int, served_late: bool
) -> None:
    with served(tmp_path, pending_timeout_s=pending_timeout_s) as service:
        service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        with stuck(service):
            calls = [service.stub.GetModelInfo.future(GetModelInfoRequest(), timeout=60) for _ in range(4)]
            clock = failure(lambda: service.stub.GetModelInfo(GetModelInfoRequest(), timeout=2.0))
            assert code(clock) == grpc.StatusCode.DEADLINE_EXCEEDED, "it was longer than a second"
        codes = {call.code() for call in calls[1:]}  # the library had handed the first one on
        assert codes == {grpc.StatusCode.OK if served_late else grpc.StatusCode.CANCELLED}


@pytest.mark.parametrize(
    ("headers", "flag", "data", "status"),
    [
        ({"grpc-encoding": "snappy"}, 0, b"", grpc.StatusCode.INTERNAL),
        ({"grpc-encoding": "gzip"}, 1, b"no gzip", grpc.StatusCode.INTERNAL),
        ({}, 1, b"of no encoding", grpc.StatusCode.INVALID_ARGUMENT),  # taken for what is not compressed
        ({"grpc-timeout": "soon"}, 0, b"", grpc.StatusCode.INTERNAL),
        ({"te": "nothing"}, 0, b"", grpc.StatusCode.INTERNAL),
    ],
)
def test_what_the_library_refuses_itself_has_its_code_and_the_connection_serves_on(
    service: Service, headers: dict[str, str], flag: int, data: bytes, status: grpc.StatusCode
) -> None:
    """INTERNAL, where INVALID_ARGUMENT or UNIMPLEMENTED would say whose mistake it is. docs/contract.md has them."""
    number = b"%d" % status.value[0]
    with RawClient(service.port) as client:
        stream = client.begin("GetModelInfo", headers)
        client.message(stream, data, ends=True, flag=flag)
        assert b"grpc-status%c%b" % (len(number), number) in client.status_of(stream).payload
        whole = client.begin("GetModelInfo")
        client.message(whole, b"", ends=True)
        client.frames_until(DATA, whole)  # the answer
    assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"
