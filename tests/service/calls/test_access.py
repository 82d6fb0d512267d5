"""Who may call what: tokens from a file, rights by method, and requests that belong to their caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.local_service import local_service
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.admission import RIGHTS_FOR, Access
from runahead.service.calls.call import FACADE
from runahead.service.credentials.callers import CallersFile
from runahead.service.servers.supervised import Security
from runahead.service.servicers.reflection import REFLECTION_SERVICES
from runahead.service.settings.settings import FrontEndSettings
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    GenerateRequest,
    GenerationServiceStub,
    StatsRequest,
    StoppingOptions,
    generation_service_pb2,
)
from runahead.v1 import FinishReason as Reason
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.health_statuses import health_statuses
from tests.service.rpc_errors import code, detail, failure, fields
from tests.service.running_service import Service

ALICE, BOB, OPS = "alice-token-0123456789", "bob-token-0123456789", "ops-token-0123456789"
WEB = "web-token-0123456789"
CALLERS = f"""
# name  rights            credential
alice   generate          token {ALICE}
bob     generate          token {BOB}
ops     generate,control  token {OPS}
watch   control           token watch-token-0123456789
web     generate,priority token {WEB}
"""
SERVICE = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"]
OURS = [f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods]
REFLECTION = [f"/{name}/ServerReflectionInfo" for name in REFLECTION_SERVICES]


ABORTED = AbortOutcome.ABORT_OUTCOME_ABORTED
ALREADY_FINISHED = AbortOutcome.ABORT_OUTCOME_ALREADY_FINISHED
NOT_FOUND = AbortOutcome.ABORT_OUTCOME_NOT_FOUND


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def secured(folder: Path, settings: FrontEndSettings | None = None, info: m.EngineInfo = INFO) -> Service:
    (folder / "callers").write_text(CALLERS)
    security = Security(Access(CallersFile(folder / "callers")), None)
    path = folder / "engine.sock"
    engine = FakeEngine(path, m.Welcome(m.PROTOCOL_VERSION, "server-1", info))
    return Service(engine, path, settings=settings or FrontEndSettings(), security=security)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with secured(tmp_path) as running:
        yield running


def call(service: Service, method: str, metadata: list[tuple[str, str]] | None = None) -> grpc.RpcError | None:
    """How a call of any method ends that sends an empty message. None: it is served, at least with a first answer."""
    multicall: Any = service.channel.stream_stream(method)
    answers = multicall(iter([b""]), timeout=TIMEOUT_S, metadata=metadata)
    try:
        next(answers, None)
    except grpc.RpcError as error:
        return error
    answers.cancel()
    return None


def reason(error: grpc.RpcError | None) -> str:
    assert error is not None, "the call was served"
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


@pytest.mark.parametrize("method", [*OURS, *REFLECTION, f"/{SERVICE.full_name}/Nothing", "/nobody.Nothing/Does"])
def test_every_method_of_every_service_asks_who_calls_before_anything_else(service: Service, method: str) -> None:
    for metadata, expected in [
        (None, "NO_CREDENTIALS"),
        (bearer("nobodys-token-0123456789"), "UNKNOWN_CREDENTIALS"),
        (bearer(ALICE[:-1]), "UNKNOWN_CREDENTIALS"),
        (bearer(ALICE) * 2, "UNKNOWN_CREDENTIALS"),
        ([("authorization", ALICE)], "UNKNOWN_CREDENTIALS"),
        ([("authorization", "Bearer ")], "UNKNOWN_CREDENTIALS"),
        ([("authorization", f"Basic {ALICE}")], "UNKNOWN_CREDENTIALS"),
    ]:
        error = call(service, method, metadata)
        assert (reason(error), code(error)) == (expected, grpc.StatusCode.UNAUTHENTICATED)  # type: ignore[arg-type]
        assert ALICE not in str(error)
    assert service.engine.submitted.empty() and not service.engine.aborts


def test_health_asks_nobody_who_they_are(service: Service) -> None:
    health = HealthStub(service.channel)
    assert health.Check(HealthCheckRequest(), timeout=TIMEOUT_S).status == HealthCheckResponse.SERVING
    assert len(health_statuses(service.channel)) == 2
    watch = health.Watch(HealthCheckRequest(), timeout=TIMEOUT_S)
    assert next(watch).status == HealthCheckResponse.SERVING
    watch.cancel()


def test_every_method_has_its_rights_and_one_without_is_nobodys(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {method for method in RIGHTS_FOR if not method.startswith(FACADE)} == {*OURS, *REFLECTION}
    monkeypatch.setattr("runahead.service.calls.admission.RIGHTS_FOR", {})
    for method in (*OURS, *REFLECTION):
        assert reason(call(service, method, bearer(OPS))) == "NO_RIGHT"


@pytest.mark.parametrize("method", [*OURS, *REFLECTION])
def test_a_caller_needs_a_right_that_the_method_asks_for(service: Service, method: str) -> None:
    for token, right in [(ALICE, "generate"), ("watch-token-0123456789", "control")]:
        error = call(service, method, bearer(token))
        if right in RIGHTS_FOR[method]:
            assert error is None or reason(error) in ("INVALID_FIELD", "NOT_SERVED"), "it was let in"
        else:
            assert (reason(error), code(error)) == ("NO_RIGHT", grpc.StatusCode.PERMISSION_DENIED)  # type: ignore[arg-type]
    assert call(service, f"/{SERVICE.full_name}/Nothing", bearer(ALICE)).code() == (  # type: ignore[union-attr]
        grpc.StatusCode.UNIMPLEMENTED
    )


def test_statistics_need_the_right_of_control(service: Service) -> None:
    assert RIGHTS_FOR[f"/{SERVICE.full_name}/Stats"] == {"control"}
    assert service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S, metadata=bearer(OPS)).HasField("stats")


def test_a_call_that_nobody_was_asked_about_has_no_rights_at_all(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Access, "admit", lambda *_, **__: None)
    for served in (
        lambda: list(service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)),
        lambda: service.stub.Abort(AbortRequest(all=True), timeout=TIMEOUT_S),
    ):
        assert code(failure(served)) == grpc.StatusCode.INTERNAL
    assert service.engine.submitted.empty() and not service.engine.aborts


# ------------------------------------------------------------ whose a request is


def open_request(service: Service, token: str, request_id: str, **options: Any) -> Any:
    request = GenerateRequest(text="x", request_id=request_id, **options)
    stream = service.stub.Generate(request, timeout=TIMEOUT_S, metadata=bearer(token))
    assert next(stream).accepted.request_id == request_id
    return stream


def abort(service: Service, token: str, *ids: str) -> list[tuple[str, int]]:
    request = AbortRequest(request_ids=ids, all=not ids)
    results = service.stub.Abort(request, timeout=TIMEOUT_S, metadata=bearer(token)).results
    return [(result.request_id, result.outcome) for result in results]


def finish(stream: Any) -> int:
    return int(list(stream)[-1].finished.reason)


def test_a_caller_ends_its_own_requests_and_somebody_elses_are_not_there(service: Service) -> None:
    own, other = open_request(service, ALICE, "r1"), open_request(service, BOB, "r2")
    assert abort(service, ALICE, "r1", "r2") == [("r1", ABORTED), ("r2", NOT_FOUND)]
    assert finish(own) == FinishReason.ABORTED
    service.engine.output(service.engine.live["bob/r2"], [1], FinishReason.LENGTH)
    assert finish(other) == FinishReason.LENGTH


def test_all_are_a_callers_own(service: Service) -> None:
    own = [open_request(service, ALICE, f"r{i}") for i in range(2)]
    other = open_request(service, BOB, "r1")
    assert sorted(abort(service, ALICE)) == [("r0", ABORTED), ("r1", ABORTED)]
    assert [finish(stream) for stream in own] == [FinishReason.ABORTED] * 2
    service.engine.output(service.engine.live["bob/r1"], [1], FinishReason.LENGTH)
    assert finish(other) == FinishReason.LENGTH, "though it has the same id"


def test_with_the_right_of_control_everybodys_requests_can_be_ended(service: Service) -> None:
    streams = [open_request(service, token, "r1") for token in (ALICE, BOB, OPS)]
    assert abort(service, OPS, "ops/r2", "r2") == [("ops/r2", NOT_FOUND), ("r2", NOT_FOUND)], "as they were sent"
    assert abort(service, OPS, "alice/r1", "r1") == [("alice/r1", ABORTED), ("r1", ABORTED)]
    assert [finish(stream) for stream in (streams[0], streams[2])] == [FinishReason.ABORTED] * 2
    assert abort(service, OPS) == [("bob/r1", ABORTED)]
    assert finish(streams[1]) == FinishReason.ABORTED


def test_without_that_right_nobody_can_be_named(service: Service) -> None:
    error = failure(lambda: abort(service, ALICE, "bob/r1"))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_ids[0]"])
    for name in ("/r1", "a/b/r1", "b ob/r1", "x" * 101 + "/r1"):
        error = failure(lambda name=name: abort(service, OPS, name))  # type: ignore[misc]
        assert fields(error) == ["request_ids[0]"]


def test_an_id_in_use_by_somebody_else_is_free(service: Service) -> None:
    streams = [open_request(service, token, "r1") for token in (ALICE, BOB)]
    again = service.stub.Generate(GenerateRequest(text="x", request_id="r1"), timeout=TIMEOUT_S, metadata=bearer(ALICE))
    assert code(failure(lambda: list(again))) == grpc.StatusCode.ALREADY_EXISTS
    for stream in streams:
        stream.cancel()


def test_the_engine_learns_who_asks_and_whose_priority_counts_across_callers(service: Service) -> None:
    for token, caller, outranks in ((ALICE, "alice", False), (WEB, "web", True), (OPS, "ops", False)):
        open_request(service, token, "r1", priority=7).cancel()
        submit = service.engine.next_submit()
        assert (submit.caller, submit.priority, submit.outranks) == (caller, 7, outranks)
        service.engine.next_cancel()


def test_the_right_to_priority_alone_allows_no_call(service: Service, tmp_path: Path) -> None:
    (tmp_path / "callers").write_text(CALLERS.replace("generate,priority", "priority"))
    for method in OURS:
        assert reason(call(service, method, bearer(WEB))) == "NO_RIGHT"


def test_a_caller_finds_its_own_prefixes_alone(service: Service) -> None:
    salts: set[str] = set()
    for token, salt in ((ALICE, ""), (BOB, ""), (ALICE, "bob/"), (ALICE, "s"), (BOB, "s")):
        open_request(service, token, f"r{len(salts)}", cache_salt=salt).cancel()
        salts.add(service.engine.next_submit().cache_salt)
        service.engine.next_cancel()
    assert len(salts) == 5


def test_prefixes_are_shared_where_a_setting_says_so(tmp_path: Path) -> None:
    with secured(tmp_path, FrontEndSettings(share_prefix_cache=True)) as service:
        for token in (ALICE, BOB):
            open_request(service, token, "r1", cache_salt="s")
            assert service.engine.next_submit().cache_salt == "s"


def test_in_the_whole_service_a_request_is_its_callers(tmp_path: Path) -> None:
    """With the engine that there really is, and each call on a connection of its own, to either of two front ends."""
    (tmp_path / "callers").write_text(CALLERS)
    with (
        local_service(["--callers", str(tmp_path / "callers"), "--frontends", "2", "--num-blocks", "600"]) as running,
        ExitStack() as channels,
    ):

        def stub() -> Any:
            options = [("grpc.use_local_subchannel_pool", 1)]
            return GenerationServiceStub(channels.enter_context(grpc.insecure_channel(running.url, options)))

        def aborted(token: str, **request: Any) -> list[tuple[str, int]]:
            results = stub().Abort(AbortRequest(**request), timeout=60, metadata=bearer(token)).results
            return [(result.request_id, result.outcome) for result in results]

        endless = GenerateRequest(
            text="def f(", request_id="r1", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True)
        )
        streams = {token: stub().Generate(endless, timeout=60, metadata=bearer(token)) for token in (ALICE, BOB)}
        for stream in streams.values():
            next(stream)
        assert aborted(BOB, request_ids=["r2"]) == [("r2", NOT_FOUND)]
        assert aborted(BOB, all=True) == [("r1", ABORTED)]
        assert finish(streams[BOB]) == Reason.FINISH_REASON_ABORTED
        assert aborted(OPS, request_ids=["r1", "bob/r1", "alice/r1"]) == [
            ("r1", NOT_FOUND), ("bob/r1", ALREADY_FINISHED), ("alice/r1", ABORTED),
        ]  # fmt: skip
        assert finish(streams[ALICE]) == Reason.FINISH_REASON_ABORTED
        later = stub().Generate(
            GenerateRequest(text="x", request_id="r2", stopping=StoppingOptions(max_tokens=1)),
            timeout=60,
            metadata=bearer(ALICE),
        )
        assert finish(later) != Reason.FINISH_REASON_ABORTED, "bob has aborted another r2, before it came"


# ------------------------------------------------------------ the file


def test_the_file_is_read_again_when_it_changes(service: Service, tmp_path: Path) -> None:
    method = f"/{SERVICE.full_name}/GetModelInfo"
    open_stream = open_request(service, BOB, "r1")
    new = "bob-token-of-today-01234"
    (tmp_path / "callers").write_text(f"bob generate token {BOB}\nbob generate token {new}\n")
    assert call(service, method, bearer(BOB)) is None
    assert call(service, method, bearer(new)) is None
    assert reason(call(service, method, bearer(ALICE))) == "UNKNOWN_CREDENTIALS"
    (tmp_path / "new").write_text(f"bob generate token {new}\n")
    (tmp_path / "new").rename(tmp_path / "callers")  # another file in its place
    assert reason(call(service, method, bearer(BOB))) == "UNKNOWN_CREDENTIALS"
    service.engine.output(service.engine.live["bob/r1"], [1], FinishReason.LENGTH)
    assert finish(open_stream) == FinishReason.LENGTH, "what was open goes on"


def test_a_file_that_is_wrong_for_a_while_changes_nothing_and_is_logged_without_a_token(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = f"/{SERVICE.full_name}/GetModelInfo"
    (tmp_path / "callers").write_text(f"bob everything token {BOB}\n")
    for _ in range(3):
        assert call(service, method, bearer(ALICE)) is None
    (tmp_path / "callers").unlink()
    assert call(service, method, bearer(ALICE)) is None
    logged = "".join(capsys.readouterr())
    assert logged.count("callers_not_read") == 2, "once for each state of the file"
    assert "line 1" in logged and BOB not in logged


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no callers"),
        ("# nobody\n", "has no callers"),
        (f"alice {ALICE}", "line 1 of .* must be: NAME RIGHTS token TOKEN"),
        (f"\nal/ice generate token {ALICE}", "line 2 of .* must begin with a name"),
        (f"alice all token {ALICE}", "must give its rights as generate or control or priority, or as several"),
        (f"alice generate,generate token {ALICE}", "must give its rights"),
        ("alice generate token short", "a token that must be 16 to 512"),
        (f"alice generate password {ALICE}", "must be: NAME RIGHTS"),
        (f"alice generate token {ALICE}\nbob generate token {ALICE}", "the same token on two lines"),
        ("a generate certificate x\nb generate certificate x", "the same certificate name on two lines"),
    ],
)
def test_a_file_that_is_wrong_at_the_start_is_refused_without_a_token(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "callers").write_text(text)
    with pytest.raises(ConfigError, match=sentence) as refused:
        CallersFile(tmp_path / "callers")
    assert ALICE not in str(refused.value)
    with pytest.raises(ConfigError, match="absent can't be read: No such file"):
        CallersFile(tmp_path / "absent")


def test_every_token_is_compared_in_constant_time_whichever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "callers").write_text(CALLERS)
    file = CallersFile(tmp_path / "callers")
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    for token in (ALICE, OPS, "nobody", ""):
        compared.clear()
        file.by_token(token.encode())
        assert compared == [(32, 32)] * 5, "digests of one length, each of them, whichever is found"
