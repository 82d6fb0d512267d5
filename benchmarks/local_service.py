"""A service for one demo or benchmark: started as a subprocess, awaited by its log, and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final

START_S: Final = 300.0  # on a GPU kernels may have to be compiled first, beside others that do
STOP_S: Final = 30.0
LOG_LINES: Final = 30
# Any that are free: several services may run here. The log says which they are, so that it is never silent about it.
BESIDE: Final = ("--health-port", "0", "--control-port", "0", "--metrics-port", "0")
Output = Callable[[Path], IO[bytes]]
DEVICE: Final = ("--device", "cpu")  # unless the flags name another
LOGS: Final = ("--log-format", "json", "--log-level", "info")


class ServiceFailed(RuntimeError):
    """The service did not start, did not stop, or left something running. Ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class LocalService:
    """Where it listens, its process, and the file that its output goes to.

    url: of the service itself, HOST:PORT. ports: of loopback, by what they are for: `service`, `health`, `control` and
    `metrics`.
    """

    url: str
    ports: Mapping[str, int]
    process: subprocess.Popen[bytes]
    log: Path


def _to_file(log: Path) -> IO[bytes]:
    return log.open("wb")


@contextlib.contextmanager
def local_service(
    flags: Sequence[str] = (),
    start_s: float = START_S,
    *,
    output: Output = _to_file,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[LocalService]:
    """Runs `runahead serve` with `flags` on a free loopback port, ready when the body begins, gone when it has ended.

    start_s: seconds that it may take to be ready. output: what the service writes to, whose bytes come to the given
    file. environment: variables beside this process's own. Raises ServiceFailed.
    """
    with started_service(flags, start_s, output=output, environment=environment) as service:
        yield service
        _stop(service)


@contextlib.contextmanager
def started_service(
    flags: Sequence[str] = (),
    start_s: float = START_S,
    port: int = 0,
    *,
    output: Output = _to_file,
    environment: Mapping[str, str] = MappingProxyType({}),
    module: str = "runahead",
) -> Iterator[LocalService]:
    """The same for a body that ends the service itself: what is left is killed without a message.

    port: 0: any that is free, chosen by the service, so that nobody else can have got it meanwhile.
    module: the command line's. Raises ServiceFailed if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
        log = Path(folder) / "service.log"
        command = [sys.executable, "-m", module, "serve", "--host", "127.0.0.1", "--port", str(port)]
        log.touch()
        with output(log) as written:
            # A separate session: the service and its children can be found and killed as a group.
            process = subprocess.Popen(
                [*command, *BESIDE, *DEVICE, *LOGS, *flags],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        try:
            ports = _until_serving(process, log, start_s)
            yield LocalService(f"127.0.0.1:{ports['service']}", ports, process, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def logged(log: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a service's log that tell of such an event, as they were written."""
    # A line that is not whole yet is left for the next look.
    whole = log.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()
    found = [json.loads(line) for line in whole if line.startswith("{")]
    return [line for line in found if line.get("event") == event]


def _until_serving(process: subprocess.Popen[bytes], log: Path, start_s: float) -> dict[str, int]:
    """The ports of which the log says that they serve."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if found := logged(log, "serving"):
            names = {"port": "service", "health_port": "health", "control_port": "control", "metrics_port": "metrics"}
            return {name: int(found[0][key]) for key, name in names.items() if found[0][key] != "off"}
        if (code := process.poll()) is not None:
            raise _failed(log, f"the service exited with status {code} before it was ready")
        time.sleep(0.05)
    raise _failed(log, f"the service was not ready within {start_s:.0f} s")


def _stop(service: LocalService) -> None:
    service.process.terminate()
    try:
        code = service.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise _failed(service.log, f"the service ran on for {STOP_S:.0f} s after SIGTERM") from None
    if code != 0:
        raise _failed(service.log, f"the service exited with status {code} after SIGTERM")
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            os.killpg(service.process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise _failed(service.log, "the service left a process running")


def _failed(log: Path, reason: str) -> ServiceFailed:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return ServiceFailed("\n".join([reason + (", and its log ends:" if lines else ", and logged nothing"), *lines]))
