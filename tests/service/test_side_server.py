"""Health and control on ports of their own: they answer however busy the service's port is, and to whom they should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.local_service import BESIDE, LocalService, started_service
from runahead.service.access import Access
from runahead.service.board import Board
from runahead.service.callers import CallersFile
from runahead.service.engine_client import SocketEngineClient
from runahead.service.front_end import GENERATION
from runahead.service.front_end_process import FRONT_END_MODULE, SIDE_MODULE
from runahead.service.health_list import HealthListRequest, HealthListResponse
from runahead.service.held import Resource
from runahead.service.security import Security
from runahead.service.settings import FrontEndSettings
from runahead.service.side_server import SideServer
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    GenerateRequest,
    GenerationServiceStub,
    StatsRequest,
    StoppingOptions,
    WatchStatsRequest,
)
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.processes import engine_of, running
from tests.service.rpc_errors import code, detail, failure

END_S = 30.0
FULL = 2  # connections to the service's port
FLAGS = ("--threads", "1", "--num-blocks", "600", "--log-format", "json", "--max-connections", str(FULL))
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
NOT_HERE = ("Generate", "GenerateOnce", "GetModelInfo", "Tokenize", "Detokenize")
ALICE, OPS = "alices-token-0123456789", "the-operators-token-0123"


def reason(error: grpc.RpcError) -> str:
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


def status(channel: grpc.Channel, name: str) -> int:
    request = HealthCheckRequest(service=name)
    return int(HealthStub(channel).Check(request, timeout=TIMEOUT_S, wait_for_ready=True).status)


# ---------------------------------------------------------------- with an engine that does what it is told


class Side:
    """A side server on an event loop of its own thread. board: of two lines, the first of a front end."""

    def __init__(self, socket_path: Path, security: Security) -> None:
        self.engine = FakeEngine(socket_path)
        self.board = Board(2)
        self._path, self._security = socket_path, security
        self._began, self._serving = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        self._thread.start()
        assert self._began.wait(TIMEOUT_S)
        self.health = grpc.insecure_channel(f"127.0.0.1:{self.health_port}")

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
    side.board.line(0).front_ends = 1
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


def test_an_engine_that_is_silent_is_not_ready_and_one_that_is_lost_not_alive(side: Side) -> None:
    side.serve()
    side.board.line(0).front_ends = 1
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


def scrape(port: int) -> dict[str, float]:
    """Samples without labels, and of those with labels the last."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_metrics_are_served_from_the_beginning_and_never_wait_for_an_engine_that_is_stuck(side: Side) -> None:
    loading = scrape(side.metrics_port)
    assert (loading["runahead_engine_up"], loading["runahead_front_ends"]) == (0, 0)
    side.serve()
    side.board.line(0).front_ends = 1
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
    side.board.line(0).front_ends = 1
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


# ---------------------------------------------------------------- the whole service


def events(service: LocalService, name: str) -> list[dict[str, Any]]:
    lines = service.log.read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in found if line["event"] == name]


def until_logged(service: LocalService, name: str) -> dict[str, Any]:
    while not (found := events(service, name)):
        assert service.process.poll() is None
    return found[0]


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with started_service(FLAGS) as running:
        yield running


@contextlib.contextmanager
def beside(service: LocalService, name: str) -> Iterator[grpc.Channel]:
    """A channel to the health or the control port, with a connection of its own."""
    port = until_logged(service, "serving")[f"{name}_port"]
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def test_health_and_control_answer_when_the_service_s_port_takes_no_more_connections(service: LocalService) -> None:
    host, port = service.url.split(":")
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(service.url))
        endless = GenerateRequest(
            text="def f():\n", request_id="endless", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True)
        )
        stream = GenerationServiceStub(channel).Generate(endless, timeout=60)
        assert [next(stream).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        held = []
        while True:  # until one is closed at once, which shows that the cap is reached
            held.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S)))
            held[-1].settimeout(TIMEOUT_S)
            with contextlib.suppress(ConnectionError):
                if held[-1].recv(1):
                    continue  # the server's first frame
            break
        assert len(held) >= FULL
        with beside(service, "health") as health, beside(service, "control") as control:
            assert (status(health, ""), status(health, GENERATION)) == (SERVING, SERVING)
            stub = GenerationServiceStub(control)
            stats = next(stub.WatchStats(WatchStatsRequest(), timeout=TIMEOUT_S)).stats
            assert stats.requests.running == stats.front_end.open_streams == 1
            assert stats.front_end.answered_by == 0, "no front end does"
            (result,) = stub.Abort(AbortRequest(request_ids=["endless"]), timeout=TIMEOUT_S).results
            assert result.outcome == AbortOutcome.ABORT_OUTCOME_ABORTED
        assert list(stream)[-1].HasField("finished")
    samples = scrape(until_logged(service, "serving")["metrics_port"])
    assert samples["runahead_engine_up"] == samples["vllm:time_to_first_token_seconds_count"] == 1
    assert samples["vllm:generation_tokens_total"] > 0


def test_what_callers_choose_is_in_no_metric(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel:
        request = GenerateRequest(text="sesame", request_id="my-own-name", stopping=StoppingOptions(max_tokens=3))
        assert list(GenerationServiceStub(channel).Generate(request, timeout=60, metadata=[("x-mine", "my-header")]))
        nothing: Any = channel.unary_unary("/my.Service/MyMethod")
        failure(lambda: nothing(b"", timeout=TIMEOUT_S))
    port = until_logged(service, "serving")["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    assert 'grpc_method="unknown"' in text, "it has been counted"
    assert not [word for word in ("sesame", "my-own-name", "my-header", "MyMethod", "127.0.0.1") if word in text]


def test_a_side_server_that_is_killed_comes_back_on_its_ports_and_harms_no_stream(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel, beside(service, "health") as health:
        endless = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True))
        stream = GenerationServiceStub(channel).Generate(endless, timeout=60)
        assert next(stream).HasField("accepted")
        (process,) = running(service, SIDE_MODULE)
        os.kill(process, signal.SIGKILL)
        until_logged(service, "side_server_started_again")
        assert running(service, SIDE_MODULE) != [process]
        while status(health, GENERATION) != SERVING:
            assert service.process.poll() is None
        assert next(stream).HasField("delta")
        stream.cancel()


@pytest.mark.parametrize("name", ["health", "control", "metrics"])
def test_a_port_that_is_taken_is_named_with_the_setting_that_gives_another(service: LocalService, name: str) -> None:
    port = str(until_logged(service, "serving")[f"{name}_port"])
    command = [sys.executable, "-m", "runahead", "serve", "--port", "0", *BESIDE, f"--{name}-port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"runahead serve: the {name} port: 127.0.0.1 port {port} can't be listened on: Address already in use; "
        f"--{name}-port takes another number, or 0 for any free port\n"
    )


def test_probes_are_answered_until_the_last_stream_has_ended_and_nothing_is_left() -> None:
    with started_service([*FLAGS, "--shutdown-grace-s", "60"]) as service:
        with grpc.insecure_channel(service.url) as channel, beside(service, "health") as health:
            stub = GenerationServiceStub(channel)
            endless = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True))
            stream = stub.Generate(endless, timeout=60)
            assert next(stream).HasField("accepted")
            watch = HealthStub(health).Watch(HealthCheckRequest(service=GENERATION), timeout=60)
            assert next(watch).status == SERVING
            service.process.send_signal(signal.SIGTERM)
            assert [answer.status for answer in watch] == [NOT_SERVING]
            assert (status(health, ""), status(health, GENERATION)) == (SERVING, NOT_SERVING)
            stream.cancel()
            assert service.process.wait(END_S) == 0
        assert running(service, SIDE_MODULE) == running(service, FRONT_END_MODULE) == []


def test_a_killed_engine_ends_the_side_server_too() -> None:
    with started_service(FLAGS) as service:
        os.kill(engine_of(service), signal.SIGKILL)
        assert service.process.wait(END_S) == 1
        assert running(service, SIDE_MODULE) == []
