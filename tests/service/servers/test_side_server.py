"""Health and control on ports of their own: they answer however busy the service's port is, and to whom they should."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from runahead.service.calls.admission import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.credentials.tls import TlsFiles, server_credentials
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.servers.side_server import SideServer
from runahead.service.servers.supervised import GENERATION, Security
from runahead.service.servicers.health import HealthListRequest, HealthListResponse
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.shared_memory.call_tables import Resource
from runahead.v1 import AbortOutcome, AbortRequest, GenerationServiceStub, StatsRequest, WatchStatsRequest
from tests.service.certificates import Authority
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.raw_http2 import ACK, GOAWAY, SETTINGS, RawClient
from tests.service.rpc_errors import code, failure
from tests.service.side_clients import reason, scrape, status

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
NOT_HERE = ("Generate", "GenerateOnce", "GetModelInfo", "Tokenize", "Detokenize", "RenderChat")
ALICE, OPS = "alices-token-0123456789", "the-operators-token-0123"


class Side:
    """A side server on an event loop of its own thread. board: of two lines, the first of a front end."""

    def __init__(self, socket_path: Path, security: Security) -> None:
        self.engine = FakeEngine(socket_path)
        self.board = Board(2)
        self._path, self._security = socket_path, security
        self._began, self._serving, self._turns = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        self._thread.start()
        assert self._began.wait(TIMEOUT_S)
        self.health = grpc.insecure_channel(f"127.0.0.1:{self.health_port}")

    def front_end_serves(self) -> None:
        """There is one, whose event loop turns until `front_end_hangs`."""
        self.board.line(0).front_ends = 1
        self._turns.set()

    def front_end_hangs(self) -> None:
        self._turns.clear()

    async def _turn(self) -> None:
        line = self.board.line(0)
        while True:
            if self._turns.is_set():
                line.beat()
            await asyncio.sleep(0.01)

    def serve(self) -> None:
        """It is told where the engine is."""
        self.tell(self._to_serve.set)
        assert self._serving.wait(TIMEOUT_S)
        self.control = grpc.insecure_channel(f"127.0.0.1:{self.control_port}")
        self.stub = GenerationServiceStub(self.control)

    def tell(self, function: Any) -> None:
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self.tell(self._end)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self.engine.close()
        self.health.close()

    def _end(self) -> None:
        self._told.set()
        self._to_serve.set()

    async def _run(self) -> None:
        self.loop, self._told, self._to_serve = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        turning = asyncio.create_task(self._turn())
        self.server = SideServer(FrontEndSettings(), self._security, self.board, 1, "0.1.0")
        self.health_port, self.metrics_port = await self.server.listen(0, 0)
        self._began.set()
        await self._to_serve.wait()
        if not self._told.is_set():
            client = await SocketEngineClient.connect(self._path)
            self.control_port = await self.server.serve(client, 0)
            self._serving.set()
            await self._told.wait()
        await self.server.stop()
        turning.cancel()


@pytest.fixture
def security() -> Security:
    return Security(Access(), None)


@pytest.fixture
def side(tmp_path: Path, security: Security) -> Iterator[Side]:
    server = Side(tmp_path / "engine.sock", security)
    yield server
    server.close()


def test_the_server_lives_before_it_has_an_engine_and_is_ready_when_a_front_end_serves(side: Side) -> None:
    assert (status(side.health, ""), status(side.health, GENERATION)) == (SERVING, NOT_SERVING)
    watch = HealthStub(side.health).Watch(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S)
    assert next(watch).status == NOT_SERVING
    side.serve()
    assert status(side.health, GENERATION) == NOT_SERVING, "an engine alone serves nobody"
    side.front_end_serves()
    assert next(watch).status == SERVING
    listed = side.health.unary_unary(
        "/grpc.health.v1.Health/List",
        request_serializer=HealthListRequest.SerializeToString,
        response_deserializer=HealthListResponse.FromString,
    )(HealthListRequest(), timeout=TIMEOUT_S)
    assert {name: found.status for name, found in listed.statuses.items()} == {"": SERVING, GENERATION: SERVING}
    side.board.clear(0)
    assert next(watch).status == NOT_SERVING, "the last front end has died"
    assert status(side.health, "") == SERVING
    watch.cancel()


def test_a_front_end_that_hangs_serves_nobody(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.service.servers.side_server._SILENT_S", 0.3)
    side.serve()
    side.front_end_serves()
    watch = HealthStub(side.health).Watch(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S)
    while next(watch).status != SERVING:
        pass
    side.front_end_hangs()
    assert next(watch).status == NOT_SERVING
    side.front_end_serves()
    assert next(watch).status == SERVING, "it was stopped, and goes on"
    watch.cancel()


def test_a_front_end_that_is_started_again_serves_at_once_though_the_one_before_had_hung(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runahead.service.servers.side_server._SILENT_S", 0.3)
    side.serve()
    side.front_end_serves()
    watch = HealthStub(side.health).Watch(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S)
    while next(watch).status != SERVING:
        pass
    side.front_end_hangs()
    assert next(watch).status == NOT_SERVING
    side.board.clear(0)
    asked = side.server._board.serving
    looks = list[object]()

    def look() -> dict[int, int]:
        looks.append(None)
        return asked()

    monkeypatch.setattr(side.server._board, "serving", look)
    while len(looks) < 2:  # it has seen that there is none
        status(side.health, "")
    side.board.line(0).front_ends = 1
    assert next(watch).status == SERVING, "before its event loop has said a word"
    watch.cancel()


def test_a_connection_without_a_call_makes_room_for_probes_before_long(
    tmp_path: Path, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runahead.service.servers.side_server._IDLE_S", 0.5, raising=False)
    side = Side(tmp_path / "engine.sock", security)
    try:
        side.serve()
        for port in (side.health_port, side.control_port):
            with RawClient(port) as silent:
                silent.frames_until(SETTINGS)
                silent.send(SETTINGS, flags=ACK)
                silent.frames_until(GOAWAY)
        assert status(side.health, "") == SERVING
    finally:
        side.close()


def test_an_engine_that_is_silent_is_not_ready_and_one_that_is_lost_not_alive(side: Side) -> None:
    side.serve()
    side.front_end_serves()
    watch = HealthStub(side.health).Watch(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S)
    while next(watch).status != SERVING:
        pass
    side.engine.answers_stats = False
    side.engine.fall_silent()
    assert next(watch).status == NOT_SERVING
    assert status(side.health, "") == SERVING
    assert reason(failure(lambda: side.stub.Stats(StatsRequest(), timeout=TIMEOUT_S))) == "ENGINE_SILENT"
    side.engine.speak_again()
    assert next(watch).status == SERVING
    side.tell(side.server.engine_lost)
    assert next(watch).status == NOT_SERVING
    assert status(side.health, "") == NOT_SERVING
    watch.cancel()


def test_metrics_are_served_from_the_beginning_and_never_wait_for_an_engine_that_is_stuck(side: Side) -> None:
    loading = scrape(side.metrics_port)
    assert (loading["runahead_engine_up"], loading["runahead_front_ends"]) == (0, 0)
    side.serve()
    side.front_end_serves()
    serving = scrape(side.metrics_port)
    assert (serving["runahead_engine_up"], serving["runahead_front_ends"]) == (1, 1)
    assert serving["vllm:num_requests_running"] == 2
    side.engine.answers_stats = False  # its heart beats on
    stuck = scrape(side.metrics_port)
    assert (stuck["runahead_engine_up"], stuck["runahead_front_ends"]) == (0, 1)
    assert not [name for name in stuck if name.startswith("vllm:")]
    side.engine.fall_silent()
    side.tell(side.server.engine_lost)
    assert scrape(side.metrics_port)["runahead_engine_up"] == 0


def test_a_drain_ends_who_watches_and_leaves_figures_and_aborts_to_the_end(side: Side) -> None:
    side.serve()
    side.front_end_serves()
    health = HealthStub(side.health).Watch(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S)
    while next(health).status != SERVING:
        pass
    figures = side.stub.WatchStats(WatchStatsRequest(), timeout=TIMEOUT_S)
    assert next(figures).stats.front_end.stats_watchers == 1
    side.tell(side.server.drain)
    assert [answer.status for answer in health] == [NOT_SERVING]
    assert reason(failure(lambda: list(figures))) == "SHUTDOWN"
    assert (status(side.health, ""), status(side.health, GENERATION)) == (SERVING, NOT_SERVING)
    assert side.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.version == "0.1.0"
    (result,) = side.stub.Abort(AbortRequest(request_ids=["r1"]), timeout=TIMEOUT_S).results
    assert result.outcome == AbortOutcome.ABORT_OUTCOME_NOT_FOUND


def test_who_holds_all_that_the_limits_of_the_service_s_port_give_keeps_nobody_from_the_control_port(
    side: Side,
) -> None:
    side.serve()
    side.board.line(0).held.add(7, dict.fromkeys(Resource, 1 << 40))
    figures = side.stub.WatchStats(WatchStatsRequest(), timeout=TIMEOUT_S)
    stats = next(figures).stats
    assert (stats.front_end.open_streams, stats.front_end.stats_watchers) == (1 << 40, 1)
    held = stats.held.queued_tokens, stats.held.tokenizing_bytes, stats.held.uploads
    assert held == (1 << 40, 1 << 40, 1 << 40)
    assert side.stub.Abort(AbortRequest(request_ids=["r1"]), timeout=TIMEOUT_S).results
    error = failure(lambda: side.stub.Abort(AbortRequest(request_ids=["?"]), timeout=TIMEOUT_S))
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert side.board.refusals() == {"INVALID_FIELD": 1}, "what is refused here is counted with the rest"


@pytest.mark.parametrize("method", NOT_HERE)
def test_what_takes_part_in_generating_is_not_served_on_the_control_port(side: Side, method: str) -> None:
    side.serve()
    multicall: Any = side.control.unary_unary(f"/{GENERATION}/{method}")
    error = failure(lambda: multicall(b"", timeout=TIMEOUT_S))
    assert (code(error), reason(error)) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED")


def test_reflection_on_the_control_port_has_the_methods_that_it_serves(side: Side) -> None:
    side.serve()
    ask: Any = side.control.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )
    answer = next(ask(iter([ServerReflectionRequest(file_containing_symbol=GENERATION)]), timeout=TIMEOUT_S))
    files = map(descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
    found = {method.name for file in files for service in file.service for method in service.method}
    assert found == {"Abort", "Stats", "Trace", "WatchStats"}


def test_the_health_port_serves_health_and_nothing_else(side: Side) -> None:
    side.serve()
    error = failure(lambda: GenerationServiceStub(side.health).Stats(StatsRequest(), timeout=TIMEOUT_S))
    assert code(error) == grpc.StatusCode.UNIMPLEMENTED


class TestCallers:
    """On the control port who calls is asked as on the service's own, and on the health port nobody is."""

    @pytest.fixture
    def security(self, tmp_path: Path) -> Security:
        callers = tmp_path / "callers"
        callers.write_text(f"alice generate token {ALICE}\nops control token {OPS}\n")
        return Security(Access(CallersFile(callers)), None)

    def test_rights_and_ownership_hold_on_the_control_port(self, side: Side) -> None:
        side.serve()
        assert status(side.health, "") == SERVING
        alice, ops = ([("authorization", f"Bearer {token}")] for token in (ALICE, OPS))
        call = side.stub.Stats
        assert reason(failure(lambda: call(StatsRequest(), timeout=TIMEOUT_S))) == "NO_CREDENTIALS"
        assert reason(failure(lambda: call(StatsRequest(), timeout=TIMEOUT_S, metadata=alice))) == "NO_RIGHT"
        stats = call(StatsRequest(), timeout=TIMEOUT_S, metadata=ops).stats
        assert dict(stats.refusals) == {"NO_CREDENTIALS": 1, "NO_RIGHT": 1}
        watch = side.stub.WatchStats(WatchStatsRequest(), timeout=TIMEOUT_S, metadata=alice)
        assert reason(failure(lambda: next(watch))) == "NO_RIGHT"
        for metadata in (alice, ops):
            side.stub.Abort(AbortRequest(all=True), timeout=TIMEOUT_S, metadata=metadata)
        assert [abort.reach for abort in side.engine.aborts] == ["alice/", ""]


class TestTls:
    """The control port speaks TLS where the service's own does, and the health port never does."""

    @pytest.fixture
    def authority(self) -> Authority:
        return Authority()

    @pytest.fixture
    def security(self, tmp_path: Path, authority: Authority) -> Security:
        certificate, key = authority.server().write(tmp_path, "server")
        return Security(Access(), server_credentials(TlsFiles(certificate, key, None)))

    def test_the_control_port_asks_for_tls_as_the_service_s_own_does(self, side: Side, authority: Authority) -> None:
        side.serve()
        assert status(side.health, "") == SERVING
        assert code(failure(lambda: side.stub.Stats(StatsRequest(), timeout=TIMEOUT_S))) == grpc.StatusCode.UNAVAILABLE
        credentials = grpc.ssl_channel_credentials(authority.pem)
        with grpc.secure_channel(f"127.0.0.1:{side.control_port}", credentials) as channel:
            assert GenerationServiceStub(channel).Stats(StatsRequest(), timeout=TIMEOUT_S).HasField("stats")
