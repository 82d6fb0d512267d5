"""The real service with a log that nobody reads any more: calls get their status, and what dies is started again."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from benchmarks.local_service import BESIDE, LOGS, LocalService
from runahead.service.processes.children import FRONT_END_MODULE
from runahead.v1 import GenerateRequest, GenerationServiceStub, ServerStats, StatsRequest, StoppingOptions
from tests.service.service_processes import has_ended, running, watched

END_S = 60.0
PIPE_BYTES = 4096
CALLS = 30  # whose lines in the log fill a small pipe more than once


@dataclass
class Read:
    """A service, and the pipe that its log goes to."""

    service: LocalService
    log: io.FileIO


@pytest.fixture
def read() -> Iterator[Read]:
    """Its log is read until it serves, and then no more."""
    command = [sys.executable, "-m", "runahead", "serve", "--port", "0", "--threads", "1", "--num-blocks", "600"]
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as log:
        process = subprocess.Popen([*command, *BESIDE, *LOGS], stderr=writer, start_new_session=True)
        os.close(writer)
        try:
            line = b""
            while not line.startswith(b"{") or (event := json.loads(line))["event"] != "serving":
                line = log.readline()
                assert line, "it ended before it served"
            fcntl.fcntl(log, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            yield Read(LocalService(f"127.0.0.1:{event['port']}", {}, process, Path(os.devnull)), log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def generate(stub: GenerationServiceStub) -> str:
    """The last event."""
    stopping = StoppingOptions(max_tokens=1)
    events = list(stub.Generate(GenerateRequest(text="x", stopping=stopping), timeout=END_S, wait_for_ready=True))
    return str(events[-1].WhichOneof("event"))


def stats_of(stub: GenerationServiceStub) -> ServerStats:
    return stub.Stats(StatsRequest(), timeout=END_S, wait_for_ready=True).stats


def dropped(stub: GenerationServiceStub) -> dict[str, int]:
    return {process.name: process.log_lines_dropped for process in stats_of(stub).processes}


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "stalled"])
def test_the_service_goes_on_without_a_reader_of_its_log(read: Read, is_gone: bool) -> None:
    service = read.service
    if is_gone:
        read.log.close()
    with grpc.insecure_channel(service.url) as channel:
        stub = GenerationServiceStub(channel)
        assert [generate(stub) for _ in range(CALLS)] == ["finished"] * CALLS
        if is_gone:
            while dropped(stub).get("front_end_1", 0) < CALLS:
                assert service.process.poll() is None
        (front_end,) = running(service, FRONT_END_MODULE)
        with watched(front_end) as end:
            os.kill(front_end, signal.SIGKILL)
            assert has_ended(end, END_S)
    with grpc.insecure_channel(service.url, [("runahead.number", 2)]) as channel:  # a connection that nobody has lost
        stub = GenerationServiceStub(channel)
        assert [generate(stub) for _ in range(CALLS)] == ["finished"] * CALLS
        if is_gone:
            while dropped(stub).get("front_end_1", 0) < 2 * CALLS or not dropped(stub)["supervisor"]:
                assert service.process.poll() is None
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(END_S) == 0
    if not is_gone:
        assert len(read.log.read(2 * PIPE_BYTES) or b"") > PIPE_BYTES - 1000, "no other line had room"
