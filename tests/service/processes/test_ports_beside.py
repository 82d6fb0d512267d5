"""The ports for health, control and metrics of a real service: they answer however busy its own is, and to the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.local_service import BESIDE, LocalService, logged, started_service
from runahead.service.processes.children import FRONT_END_MODULE, SIDE_MODULE
from runahead.service.servers.supervised import GENERATION
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    GenerateRequest,
    GenerationServiceStub,
    StatsRequest,
    StoppingOptions,
    WatchStatsRequest,
)
from tests.service.fake_engine import TIMEOUT_S
from tests.service.rpc_errors import failure
from tests.service.service_processes import engine_of, running
from tests.service.side_clients import scrape, status

END_S = 30.0
FULL = 2  # connections to the service's port
FLAGS = ("--threads", "1", "--num-blocks", "600", "--max-connections", str(FULL))
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def until_logged(service: LocalService, name: str) -> None:
    while not logged(service.log, name):
        assert service.process.poll() is None


def until_ready(service: LocalService, health: grpc.Channel) -> None:
    """The side server looks for who serves several times a second, and so knows of it a little later."""
    while status(health, GENERATION) != SERVING:
        assert service.process.poll() is None


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def beside(service: LocalService, name: str) -> Iterator[grpc.Channel]:
    """A channel to the health or the control port, with a connection of its own."""
    with grpc.insecure_channel(f"127.0.0.1:{service.ports[name]}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with started_service(FLAGS) as running:
        with beside(running, "health") as health:
            until_ready(running, health)
        yield running


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
    samples = scrape(service.ports["metrics"])
    assert samples["runahead_engine_up"] == samples["vllm:time_to_first_token_seconds_count"] == 1
    assert samples["vllm:generation_tokens_total"] > 0


def test_health_figures_and_aborts_need_no_turn_of_a_front_end() -> None:
    with started_service(FLAGS) as service, grpc.insecure_channel(service.url) as channel:
        endless = GenerateRequest(
            text="def f():\n", request_id="endless", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True)
        )
        stream = GenerationServiceStub(channel).Generate(endless, timeout=60)
        assert [next(stream).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        (front_end,) = running(service, FRONT_END_MODULE)
        for process in (service.process.pid, front_end):  # the supervisor first, which would end one that hangs
            os.kill(process, signal.SIGSTOP)
        with beside(service, "health") as health, beside(service, "control") as control:
            assert status(health, "") == SERVING
            stub = GenerationServiceStub(control)
            assert stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.requests.running == 1
            (result,) = stub.Abort(AbortRequest(request_ids=["endless"]), timeout=TIMEOUT_S).results
            assert result.outcome == AbortOutcome.ABORT_OUTCOME_ABORTED
        assert is_stopped(front_end), "it has taken no part"
        os.kill(service.process.pid, signal.SIGKILL)


def test_what_callers_choose_is_in_no_metric(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel:
        request = GenerateRequest(text="sesame", request_id="my-own-name", stopping=StoppingOptions(max_tokens=3))
        assert list(GenerationServiceStub(channel).Generate(request, timeout=60, metadata=[("x-mine", "my-header")]))
        nothing: Any = channel.unary_unary("/my.Service/MyMethod")
        failure(lambda: nothing(b"", timeout=TIMEOUT_S))
    with urllib.request.urlopen(f"http://127.0.0.1:{service.ports['metrics']}/metrics", timeout=TIMEOUT_S) as response:
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
        until_ready(service, health)
        assert next(stream).HasField("delta")
        stream.cancel()


@pytest.mark.parametrize("name", ["health", "control", "metrics"])
def test_a_port_that_is_taken_is_named_with_the_setting_that_gives_another(service: LocalService, name: str) -> None:
    port = str(service.ports[name])
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
            until_ready(service, health)
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
        with beside(service, "health") as health:
            watch = HealthStub(health).Watch(HealthCheckRequest(service=""), timeout=60)
            assert next(watch).status == SERVING
            os.kill(engine_of(service), signal.SIGKILL)
            assert [answer.status for answer in watch] == [NOT_SERVING], (
                "whoever watches is told, and no connection breaks"
            )
        assert service.process.wait(END_S) == 1
        assert running(service, SIDE_MODULE) == []
