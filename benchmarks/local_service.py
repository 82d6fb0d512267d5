"""A service of its own for a demo or a benchmark: started as a subprocess, awaited through health, stopped for good."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_S: Final = 300.0  # on a GPU kernels may have to be compiled first, beside others that do
STOP_S: Final = 30.0
LOG_LINES: Final = 30
# Any that are free: several services may run here.
BESIDE: Final = ("--health-port", "0", "--control-port", "0", "--metrics-port", "0")


class ServiceFailed(RuntimeError):
    """The service did not start, did not stop, or left something running. Ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class LocalService:
    """Where it listens, its process, and the file that its output goes to."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextlib.contextmanager
def local_service(flags: Sequence[str] = (), start_s: float = START_S) -> Iterator[LocalService]:
    """Runs `runahead serve` with `flags` on a free loopback port, ready when the body begins, gone when it has ended.

    start_s: seconds that it may take to be ready. Raises ServiceFailed.
    """
    with started_service(flags, start_s) as service:
        yield service
        _stop(service)


@contextlib.contextmanager
def started_service(flags: Sequence[str] = (), start_s: float = START_S, port: int = 0) -> Iterator[LocalService]:
    """The same for a body that ends the service itself: whatever is left is ended by force, and nothing is said of it.

    port: 0: a free one. Raises ServiceFailed if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
        log = Path(folder) / "service.log"
        url = f"127.0.0.1:{port or free_port()}"
        command = [
            sys.executable,
            "-m",
            "runahead",
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            url.split(":")[1],
            *BESIDE,
            *flags,
        ]
        with log.open("wb") as output:
            # A session of its own: the service and whatever it starts can be looked for, and ended, by their group.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        service = LocalService(url, process, log)
        try:
            _wait_until_serving(service, start_s)
            yield service
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_serving(service: LocalService, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    with grpc.insecure_channel(service.url) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if (code := service.process.poll()) is not None:
                raise _failed(service, f"the service exited with status {code} before it was ready")
            with contextlib.suppress(grpc.RpcError):
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.05)
    raise _failed(service, f"the service was not ready within {start_s:.0f} s")


def _stop(service: LocalService) -> None:
    service.process.terminate()
    try:
        code = service.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise _failed(service, f"the service ran on for {STOP_S:.0f} s after SIGTERM") from None
    if code != 0:
        raise _failed(service, f"the service exited with status {code} after SIGTERM")
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            os.killpg(service.process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise _failed(service, "the service left a process running")


def _failed(service: LocalService, reason: str) -> ServiceFailed:
    lines = service.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return ServiceFailed("\n".join([reason + (", and its log ends:" if lines else ", and logged nothing"), *lines]))


def free_port() -> int:
    """A loopback port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
