"""The demo against a server that plays a script, and the service that it starts for itself."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from benchmarks.demo import DemoFailed, perform
from benchmarks.local_service import ServiceFailed, local_service
from runahead.service.commands.stats_command import stats_lines
from runahead.v1 import control_pb2, generate_pb2, generation_service_pb2_grpc, model_pb2, stats_pb2


class ScriptedService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Every stream has three lines and an end; one that ignores its end goes on to a stop string or an abort."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.ends_stop_strings = True

    def GetModelInfo(self, request: Any, context: Any) -> model_pb2.GetModelInfoResponse:
        return model_pb2.GetModelInfoResponse(model="scripted", parameters=5_000_000, context_length=2048)

    def Generate(self, request: Any, context: Any) -> Iterator[generate_pb2.GenerateResponse]:
        yield generate_pb2.GenerateResponse(accepted=generate_pb2.Accepted(request_id=request.request_id))
        reason = generate_pb2.FINISH_REASON_END_OF_SEQUENCE
        if request.stopping.stop and self.ends_stop_strings:
            reason = generate_pb2.FINISH_REASON_STOP
        for number in range(3):
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text=f"{number}\n    "))
        if request.stopping.ignore_eos and not request.stopping.stop:
            while not self.aborted.wait(0.001):
                yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text="more\n"))
            reason = generate_pb2.FINISH_REASON_ABORTED
        usage = generate_pb2.Usage(completion_tokens=3)
        yield generate_pb2.GenerateResponse(finished=generate_pb2.Finished(reason=reason, usage=usage))

    def Abort(self, request: Any, context: Any) -> control_pb2.AbortResponse:
        self.aborted.set()
        results = [control_pb2.AbortResult(request_id=i, outcome="ABORT_OUTCOME_ABORTED") for i in request.request_ids]
        return control_pb2.AbortResponse(results=results)

    def Stats(self, request: Any, context: Any) -> stats_pb2.StatsResponse:
        stats = stats_pb2.ServerStats()
        stats.chain.overlap_ratio, stats.chain.overlapped, stats.chain.ledger_depth_max = 0.875, 7, 2
        return stats_pb2.StatsResponse(stats=stats)


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(10))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_every_stream_is_shown_line_by_line_and_one_is_aborted(
    url: str, service: ScriptedService, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(perform(url))
    printed = capsys.readouterr().out
    assert service.aborted.is_set()
    assert " endless │ ── ABORTED, 3 tokens" in printed
    assert "    line │ ── STOP, 3 tokens" in printed
    assert "    copy │ def copy_file(source, target):" in printed
    assert "    copy │ 0\n" in printed
    assert "overlap_ratio 0.875" in printed


def test_a_stream_that_ends_as_it_should_not_fails_the_demo(url: str, service: ScriptedService) -> None:
    service.ends_stop_strings = False
    with pytest.RaisesGroup(pytest.RaisesExc(DemoFailed, match="stream line ended END_OF_SEQUENCE")):
        asyncio.run(perform(url))


def test_a_service_that_does_not_start_fails_with_its_own_reason() -> None:
    with (
        pytest.raises(ServiceFailed, match=r"(?s)status 2 before it was ready.*'\./absent' is neither a folder"),
        local_service(["--model", "./absent"]),
    ):
        raise AssertionError("it started")


def test_the_demo_on_the_bundled_model_ends_well_and_leaves_nothing_running() -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo"], capture_output=True, text=True, timeout=110, check=False
    )
    assert demo.returncode == 0, demo.stderr
    assert " endless │ ── ABORTED" in demo.stdout
    assert "    line │ ── STOP" in demo.stdout
    ratio = re.search(r"overlap_ratio ([01]\.[0-9]+)", demo.stdout)
    assert ratio and float(ratio[1]) > 0.5, demo.stdout
    depth = re.search(r"run_ahead 2, ledger_depth 0, .*launches_by_depth \(1: (\d+); 2: (\d+)\)", demo.stdout)
    assert depth, demo.stdout
    assert int(depth[2]) > int(depth[1]), "most launches are as deep as was asked for"
    assert "left nothing running" in demo.stdout


def test_figures_that_are_missing_are_no_figures() -> None:
    lines = "\n".join(stats_lines(stats_pb2.ServerStats()))
    assert "first_token_s  unknown" in lines
    assert "events (none), aborted (none)" in lines


def test_lifecycle_figures_say_how_often_the_chain_held() -> None:
    stats = stats_pb2.ServerStats()
    event = stats.lifecycle.events["admitted"]
    event.count, event.held, event.idle = 5, 3, 1
    stats.lifecycle.events["paused"].count = 2
    stats.lifecycle.aborted["DECODE"] = 4
    lines = "\n".join(stats_lines(stats))
    assert "events (admitted: count 5, held 3, idle 1; paused: count 2, held 0, idle 0), aborted (DECODE: 4)" in lines
