"""What an operator asks of a service under load: health on its own port, figures, and aborts.

The prober is a separate process, so that it does not measure how busy the client is: `python -m
benchmarks.load.probes ADDRESS HEALTH_PORT CONTROL_PORT`, until its input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from runahead.v1 import AbortRequest, GenerationServiceStub, StatsRequest

EVERY_S: Final = 0.2
TIMEOUT_S: Final = 30.0
HEALTH: Final = "a health check on its own port"
CONTROL: Final = "Stats on the control port"
STATS: Final = "Stats on an open connection"
ABORT: Final = "Abort on an open connection"


@dataclass(slots=True)
class Answers:
    """Answers to probes. times_s: of each answer, by kind. wrong: a sentence for each wrong answer."""

    times_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@asynccontextmanager
async def probed(url: str, health_port: int, control_port: int) -> AsyncIterator[Answers]:
    """Asks again and again while the body runs; what came of it is there when the body has ended."""
    answers = Answers()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.load.probes", url, str(health_port), str(control_port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("the probes could not reach the service; their process has said why")
        yield answers
        process.stdin.close()
        found = json.loads(await process.stdout.read())
        answers.times_s, answers.wrong = found["times_s"], found["wrong"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class _Prober(threading.Thread):
    """Asks one thing, of which one call is open at a time. first_s: when it begins, in seconds from now."""

    def __init__(self, ask: Callable[[], object], first_s: float, ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._first_s = first_s
        self._ended = ended
        self.times_s: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        due = time.monotonic() + self._first_s
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            begun = time.monotonic()
            try:
                self._ask()
                self.times_s.append(time.monotonic() - begun)
            except grpc.RpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")
            due = max(due + EVERY_S, time.monotonic())


def main(url: str, health_port: int, control_port: int) -> None:
    """Says `ready` when every connection is open, and what came of it all when its input has ended."""
    with (
        grpc.insecure_channel(url) as service,
        grpc.insecure_channel(f"127.0.0.1:{health_port}") as health,
        grpc.insecure_channel(f"127.0.0.1:{control_port}") as control,
    ):
        asks = _asks(HealthStub(health), GenerationServiceStub(control), GenerationServiceStub(service))
        for ask in asks.values():
            ask()
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        ended = threading.Event()
        # One after the other: none of them waits for another here.
        apart_s = EVERY_S / len(asks)
        probers = {name: _Prober(ask, place * apart_s, ended) for place, (name, ask) in enumerate(asks.items())}
        for prober in probers.values():
            prober.start()
        sys.stdin.read()
        ended.set()
        for prober in probers.values():
            prober.join(TIMEOUT_S)
    wrong = [f"{name}: {failure}" for name, prober in probers.items() for failure in prober.failures]
    print(json.dumps({"times_s": {name: prober.times_s for name, prober in probers.items()}, "wrong": wrong}))


def _asks(
    health: Any, control: GenerationServiceStub, service: GenerationServiceStub
) -> dict[str, Callable[[], object]]:
    nobody = AbortRequest(request_ids=["nobody"])
    return {
        HEALTH: lambda: health.Check(HealthCheckRequest(), timeout=TIMEOUT_S),
        CONTROL: lambda: control.Stats(StatsRequest(), timeout=TIMEOUT_S),
        STATS: lambda: service.Stats(StatsRequest(), timeout=TIMEOUT_S),
        ABORT: lambda: service.Abort(nobody, timeout=TIMEOUT_S),
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
