"""The processes of a real service, and streams that are open while something happens to them."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2

from benchmarks.local_service import LocalService
from runahead.service.processes.children import ENGINE_MODULE
from runahead.v1 import GenerateRequest, GenerationServiceStub, StoppingOptions
from tests.service.rpc_errors import code, detail, failure

STREAMS = 3


def engine_of(service: LocalService) -> int:
    """The engine's process id."""
    (engine,) = running(service, ENGINE_MODULE)
    return engine


def running(service: LocalService, module: str) -> list[int]:
    """The process ids, in order, of the service's processes that run a module. The service is a session of its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if module.encode() in arguments and os.getsid(int(folder.name)) == service.process.pid:
                found.append(int(folder.name))
    return sorted(found)


def open_streams(channel: grpc.Channel, max_tokens: int = 2000) -> list[Any]:
    """Streams that have brought text, and would go on for long."""
    endless = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=max_tokens, ignore_eos=True))
    calls = [GenerationServiceStub(channel).Generate(endless, timeout=60) for _ in range(STREAMS)]
    for call in calls:
        assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    return calls


def check_failed_once(calls: list[grpc.Call]) -> None:
    """Each of these streams ends once, and says that the device is lost."""
    for call in calls:
        events: list[str] = []
        error = failure(lambda call=call, events=events: events.extend(e.WhichOneof("event") for e in call))  # type: ignore[misc]
        assert code(error) == grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.ErrorInfo).reason == "DEVICE"
        assert "finished" not in events


@contextlib.contextmanager
def watched(process: int) -> Iterator[int]:
    """A descriptor that becomes readable when the process has ended. It names this one, whoever gets its number."""
    descriptor = os.pidfd_open(process)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def has_ended(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])
