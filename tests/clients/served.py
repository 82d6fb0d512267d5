"""A service on a port that the system has chosen, and a server that refuses every call."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.local_service import BESIDE, START_S

STOP_S: Final = 60.0


@contextlib.contextmanager
def served(folder: Path, flags: Sequence[str | Path] = ()) -> Iterator[str]:
    """HOST:PORT of the bundled model, whole, as users start it; gone when the body has ended."""
    command = [sys.executable, "-m", "runahead", "serve", "--port", "0", *BESIDE, "--log-format", "json"]
    log = folder / "service.log"
    with log.open("wb") as output:
        # A session of its own, so that whatever it starts ends with it.
        process = subprocess.Popen(
            [*command, *map(str, flags)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield f"127.0.0.1:{_port(process, log)}"
        process.terminate()
        assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port that the log names as soon as the service is ready."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(encoding="utf-8").splitlines():
            if line.startswith("{") and line.endswith("}") and (event := json.loads(line))["event"] == "serving":
                return int(event["port"])
        time.sleep(0.05)
    raise AssertionError(f"the service did not start:\n{log.read_text(encoding='utf-8')}")


@dataclass
class RefusingServer(grpc.GenericRpcHandler):
    """Ends every call with one code, and keeps the headers of each attempt."""

    code: grpc.StatusCode
    attempts: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""

    def __enter__(self) -> RefusingServer:
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        self.attempts.append({"method": handler_call_details.method, **dict(handler_call_details.invocation_metadata)})
        return grpc.unary_stream_rpc_method_handler(self._refuse)

    def _refuse(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(self.code, "as it always does")
        yield b""  # never reached: this makes a stream of it
