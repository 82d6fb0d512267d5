"""TLS and mutual TLS: certificates that are read again when their files change, and callers known by theirs."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.local_service import BESIDE
from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.parameters import FinishReason
from runahead.service import cli
from runahead.service.servers.supervised import load_security
from runahead.service.settings.server_config import check_security
from runahead.service.settings.settings import FrontEndSettings, flag_of
from runahead.v1 import (
    AbortRequest,
    GenerateRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    StatsRequest,
    StoppingOptions,
)
from tests.service.certificates import Authority, Pair
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure
from tests.service.running_service import Service

TOKEN = "alice-token-0123456789"


def trusting(authority: Authority, client: Pair | None = None) -> grpc.ChannelCredentials:
    if client is None:
        return grpc.ssl_channel_credentials(authority.pem)
    return grpc.ssl_channel_credentials(authority.pem, client.key, client.certificate)


@contextmanager
def served(folder: Path, authority: Authority, client: Pair | None = None, **settings: Any) -> Iterator[Service]:
    """A service whose certificate is of the authority, and its client's channel."""
    certificate, key = authority.server().write(folder, "server")
    chosen = FrontEndSettings(tls_cert=str(certificate), tls_key=str(key), **settings)
    check_security(chosen, flag_of)
    path = folder / "engine.sock"
    running = Service(
        FakeEngine(path),
        path,
        settings=chosen,
        security=load_security(chosen, flag_of),
        channel_credentials=trusting(authority, client),
    )
    with running:
        yield running


def answers(service: Service, credentials: grpc.ChannelCredentials | None) -> bool:
    """Whether a new connection gets an answer."""
    if credentials is None:
        channel = grpc.insecure_channel(f"127.0.0.1:{service.port}")
    else:
        channel = service.connect(credentials)
    with channel:
        try:
            GenerationServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            assert code(error) == grpc.StatusCode.UNAVAILABLE, error
            return False
    return True


def test_only_through_tls_and_from_the_authority_that_the_client_trusts(tmp_path: Path) -> None:
    authority = Authority()
    with served(tmp_path, authority) as service:
        assert answers(service, trusting(authority))
        assert not answers(service, None)
        assert not answers(service, trusting(Authority("another")))


def test_new_handshakes_get_a_new_certificate_and_an_open_stream_lives(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    with served(tmp_path, old) as service:
        stream = service.stub.Generate(GenerateRequest(text="x"), timeout=60)
        handle = service.engine.next_submit().handle
        next(stream)
        assert (answers(service, trusting(old)), answers(service, trusting(new))) == (True, False)
        new.server().write(tmp_path, "server")
        assert (answers(service, trusting(old)), answers(service, trusting(new))) == (False, True)
        service.engine.output(handle, [1], FinishReason.LENGTH)
        assert list(stream)[-1].HasField("finished"), "its connection was made before, and stays"


def test_a_certificate_without_its_key_is_not_taken_until_the_key_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = Authority("old"), Authority("new")
    with served(tmp_path, old) as service:
        pair = new.server()
        (tmp_path / "server.crt").write_bytes(pair.certificate)
        for _ in range(2):
            assert (answers(service, trusting(old)), answers(service, trusting(new))) == (True, False)
        assert "".join(capsys.readouterr()).count("certificate_not_read") == 1
        (tmp_path / "server.key").write_bytes(pair.key)
        assert (answers(service, trusting(old)), answers(service, trusting(new))) == (False, True)


def test_a_client_without_a_certificate_of_the_authority_is_nobody(tmp_path: Path) -> None:
    authority, clients = Authority(), Authority("clients")
    (tmp_path / "clients.crt").write_bytes(clients.pem)
    own = clients.client("batch")
    with served(tmp_path, authority, own, tls_client_ca=str(tmp_path / "clients.crt")) as service:
        assert answers(service, trusting(authority, own))
        assert not answers(service, trusting(authority))
        assert not answers(service, trusting(authority, Authority("clients").client("batch")))
        newer = Authority("newer clients")
        (tmp_path / "clients.crt").write_bytes(newer.pem)
        assert not answers(service, trusting(authority, own)), "the authorities of clients are read again, too"
        assert answers(service, trusting(authority, newer.client("batch")))


@pytest.mark.parametrize(
    ("client", "prefix"),
    [(("batch",), "batch"), (("batch", "a.example"), "a.example"), (("team/one é",), "team%2Fone%20%C3%A9")],
)
def test_without_a_list_of_callers_a_certificate_may_generate_under_its_name(
    tmp_path: Path, client: tuple[str, ...], prefix: str
) -> None:
    authority = Authority()
    (tmp_path / "clients.crt").write_bytes(authority.pem)
    own = authority.client(*client)
    with served(tmp_path, authority, own, tls_client_ca=str(tmp_path / "clients.crt")) as service:
        stream = service.stub.Generate(GenerateRequest(text="x", request_id="r1"), timeout=TIMEOUT_S)
        next(stream)
        submit = service.engine.next_submit()
        assert (submit.request_id, submit.cache_salt) == (f"{prefix}/r1", f"{prefix}/")
        service.stub.Abort(AbortRequest(all=True), timeout=TIMEOUT_S)
        assert service.engine.aborts[0].reach == f"{prefix}/"
        error = failure(lambda: service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S))
        assert code(error) == grpc.StatusCode.PERMISSION_DENIED


def test_a_list_of_callers_says_whose_certificate_it_is_and_what_it_may(tmp_path: Path) -> None:
    authority = Authority()
    (tmp_path / "clients.crt").write_bytes(authority.pem)
    (tmp_path / "callers").write_text(f"ops control certificate ops.example\nalice generate token {TOKEN}\n")
    settings = {"tls_client_ca": str(tmp_path / "clients.crt"), "callers": str(tmp_path / "callers")}
    ops, other = authority.client("x", "other.example", "ops.example"), authority.client("other.example")
    with served(tmp_path, authority, ops, **settings) as service:
        assert service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).HasField("stats")
        error = failure(lambda: list(service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)))
        assert code(error) == grpc.StatusCode.PERMISSION_DENIED
        with service.connect(trusting(authority, other)) as channel:
            stub = GenerationServiceStub(channel)
            error = failure(lambda: stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S))
            assert code(error) == grpc.StatusCode.UNAUTHENTICATED
            assert detail(error, error_details_pb2.ErrorInfo).reason == "UNKNOWN_CREDENTIALS"
            metadata = [("authorization", f"Bearer {TOKEN}")]
            assert stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S, metadata=metadata).model == "fake"


def test_a_common_name_counts_only_where_there_is_no_alternative_name_and_the_first_of_several_is_whose_it_is(
    tmp_path: Path,
) -> None:
    authority = Authority()
    (tmp_path / "clients.crt").write_bytes(authority.pem)
    (tmp_path / "callers").write_text("batch generate certificate batch.example\nops control certificate ops.example\n")
    settings = {"tls_client_ca": str(tmp_path / "clients.crt"), "callers": str(tmp_path / "callers")}
    with served(tmp_path, authority, authority.client("ops.example"), **settings) as service:

        def stats(*names: str) -> grpc.StatusCode | None:
            with service.connect(trusting(authority, authority.client(*names))) as channel:
                try:
                    GenerationServiceStub(channel).Stats(StatsRequest(), timeout=TIMEOUT_S)
                except grpc.RpcError as error:
                    return code(error)
            return None

        assert stats("ops.example") is None, "who has the right of control is let in"
        assert stats("ops.example", "mallory.example") == grpc.StatusCode.UNAUTHENTICATED
        assert stats("ops.example", "batch.example") == grpc.StatusCode.PERMISSION_DENIED
        assert stats("x", "batch.example", "ops.example") == grpc.StatusCode.PERMISSION_DENIED
        assert stats("x", "ops.example", "batch.example") is None
        assert stats("x", "mallory.example", "ops.example") is None


# ------------------------------------------------------------ what must be said aloud

LOOPBACK, OPEN = "127.0.0.1", "0.0.0.0"
TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"host": OPEN}, "asks nobody who they are.*--callers.*--insecure"),
        ({"host": OPEN, **TLS}, "asks nobody who they are"),
        ({"host": OPEN, "callers": "f"}, "can read the callers' tokens.*--plaintext-tokens"),
        ({"host": OPEN, "callers": "f", "insecure": True}, "can read the callers' tokens"),
        ({"host": LOOPBACK, "tls_cert": "c"}, "--tls-cert needs --tls-key beside it"),
        ({"host": LOOPBACK, "tls_key": "k"}, "--tls-key needs --tls-cert beside it"),
        ({"host": LOOPBACK, "tls_client_ca": "a"}, "--tls-client-ca needs --tls-cert beside it"),
        ({"host": LOOPBACK, "plaintext_tokens": True}, "--plaintext-tokens has no effect"),
        ({"host": LOOPBACK, "plaintext_tokens": True, "callers": "f", **TLS}, "--plaintext-tokens has no effect"),
    ],
)
def test_what_is_too_open_or_has_no_effect_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_security(FrontEndSettings(**settings), flag_of)


@pytest.mark.parametrize(
    "settings",
    [
        {"host": LOOPBACK},
        {"host": LOOPBACK, "callers": "f"},
        {"host": OPEN, "insecure": True},
        {"host": OPEN, "insecure": True, **TLS},
        {"host": OPEN, "callers": "f", **TLS},
        {"host": OPEN, "tls_client_ca": "a", **TLS},
        {"host": OPEN, "callers": "f", "plaintext_tokens": True},
    ],
)
def test_what_is_said_aloud_or_asks_who_calls_is_taken(settings: dict[str, Any]) -> None:
    check_security(FrontEndSettings(**settings), flag_of)


def test_files_that_can_not_be_used_are_named_at_the_start(tmp_path: Path) -> None:
    one, other = Authority().server(), Authority().server()
    certificate, key = one.write(tmp_path, "one")
    _, wrong_key = other.write(tmp_path, "other")
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "callers").write_text("ops control certificate ops.example\n")
    good = FrontEndSettings(tls_cert=str(certificate), tls_key=str(key))
    assert load_security(good, flag_of).credentials is not None
    text, absent = str(tmp_path / "text"), str(tmp_path / "absent")
    for changes, sentence in [
        ({"tls_cert": absent}, "absent can't be read: No such file"),
        ({"tls_cert": text}, "text and .* are not a PEM certificate and its key"),
        ({"tls_key": str(wrong_key)}, "one.crt and .*other.key are not a PEM certificate and its key"),
        ({"tls_client_ca": text}, "text has no certificates in PEM"),
        ({"tls_client_ca": absent}, "absent can't be read"),
        ({"callers": absent}, "callers file .*absent can't be read"),
        ({"callers": str(tmp_path / "callers")}, "--callers names callers by their certificates.*--tls-client-ca"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            load_security(msgspec.structs.replace(good, **changes), flag_of)


def test_the_whole_service_serves_through_tls_and_takes_new_certificates(tmp_path: Path) -> None:
    """`runahead serve` itself, whose front ends are processes of their own."""
    old, new = Authority("old"), Authority("new")
    certificate, key = old.server().write(tmp_path, "server")
    (tmp_path / "callers").write_text(f"alice generate token {TOKEN}\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "runahead", "serve", "--port", url.split(":")[1], *BESIDE, "--no-reflection"]
    command += ["--tls-cert", str(certificate), "--tls-key", str(key), "--callers", str(tmp_path / "callers")]
    metadata = [("authorization", f"Bearer {TOKEN}")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            with grpc.secure_channel(url, trusting(old)) as channel:
                HealthStub(channel).Check(HealthCheckRequest(), timeout=90, wait_for_ready=True)
                stub = GenerationServiceStub(channel)
                error = failure(lambda: stub.GetModelInfo(GetModelInfoRequest(), timeout=60))
                assert code(error) == grpc.StatusCode.UNAUTHENTICATED
                endless = GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True))
                stream = stub.Generate(endless, timeout=90, metadata=metadata)
                next(stream)
                new.server().write(tmp_path, "server")
                with grpc.secure_channel(url, trusting(new)) as later:
                    asked = GenerationServiceStub(later).GetModelInfo(
                        GetModelInfoRequest(), timeout=60, metadata=metadata
                    )
                    assert asked.model == "bundled"
                next(stream)
                stream.cancel()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


# ------------------------------------------------------------ the client of the command line


def completing(service: Service) -> threading.Thread:
    """Answers the next request with one token."""

    def answer() -> None:
        service.engine.output(service.engine.next_submit().handle, [72], FinishReason.LENGTH)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_the_command_line_reaches_a_server_that_asks_for_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority()
    for name, text in (("ca.crt", authority.pem.decode()), ("token", TOKEN + "\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "callers").write_text(f"alice generate token {TOKEN}\n")
    own = authority.client("batch")
    certificate, key = own.write(tmp_path, "client")
    settings = {"tls_client_ca": str(tmp_path / "ca.crt"), "callers": str(tmp_path / "callers")}
    with served(tmp_path, authority, own, **settings) as service:
        flags = ["--url", f"localhost:{service.port}", "--ca", str(tmp_path / "ca.crt")]
        flags += ["--cert", str(certificate), "--key", str(key)]
        assert cli.main(["generate", "x", *flags]) == 1
        assert "UNAUTHENTICATED: " in capsys.readouterr().err
        thread = completing(service)
        assert cli.main(["generate", "x", *flags, "--token-file", str(tmp_path / "token")]) == 0
        thread.join(TIMEOUT_S)
        assert "LENGTH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--token-file", "{token}", "--url", "example.org:1"], "would send a token to example.org:1 in plain text"),
        (["--token-file", "{absent}"], "absent can't be read: No such file"),
        (["--token-file", "{two}"], "must hold one token and nothing else"),
        (["--ca", "{absent}"], "--ca .*absent can't be read"),
        (["--cert", "{token}"], "--cert and --key go together"),
    ],
)
def test_a_flag_of_the_connection_that_can_not_be_is_a_usage_error(
    tmp_path: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "two").write_text(f"{TOKEN}\n{TOKEN}\n")
    names = {name: str(tmp_path / name) for name in ("token", "two", "absent")}
    assert cli.main(["generate", "x", *(flag.format(**names) for flag in flags)]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1 and TOKEN not in printed
    assert re.search(sentence, printed), printed
