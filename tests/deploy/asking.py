"""What a kubelet, a client and Prometheus are told: `python -m tests.deploy.asking FILE` prints it, as JSON.

It runs in the network of the pod that it asks.
"""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runahead.v1 import GenerateOnceRequest, GenerationServiceStub, SamplingOptions, StoppingOptions

CALL_S: Final = 20.0
_LOOK_S: Final = 0.05


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """probes: of kubelet, by name, as the manifest has them. port, metrics_port: of the service. token: of a caller.
    others: tokens of nobody; an empty one is none. authority: of the server's certificate, PEM; empty is plain text.
    start_s: for which to wait for the first probe."""

    probes: Mapping[str, Mapping[str, Any]]
    port: int
    metrics_port: int
    token: str
    others: Sequence[str] = ("",)
    authority: str = ""
    start_s: float = 120.0


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """probes: a status by each probe's name. text: of a completion. others: statuses of the same call with the other
    tokens. metrics: what Prometheus reads."""

    probes: Mapping[str, str]
    text: str
    others: Sequence[str]
    metrics: str


def ask(questions: Questions) -> Answers:
    """Waits until the startup probe succeeds. Raises TimeoutError where it does not."""
    deadline = time.monotonic() + questions.start_s
    while probe(questions.probes["startupProbe"]) != "SERVING":
        if time.monotonic() > deadline:
            raise TimeoutError(f"not started after {questions.start_s:.0f} s")
        time.sleep(_LOOK_S)
    request = GenerateOnceRequest(
        text="def f(x):\n", sampling=SamplingOptions(temperature=0), stopping=StoppingOptions(max_tokens=8)
    )
    with _channel(questions) as channel:
        service = GenerationServiceStub(channel)
        text = service.GenerateOnce(request, timeout=CALL_S, metadata=_with(questions.token)).text
        others = []
        for other in questions.others:
            try:
                service.GenerateOnce(request, timeout=CALL_S, metadata=_with(other))
                others.append("OK")
            except grpc.RpcError as error:
                others.append(error.code().name)
    with urllib.request.urlopen(f"http://127.0.0.1:{questions.metrics_port}/metrics", timeout=CALL_S) as answer:
        metrics = answer.read().decode()
    probes = {name: probe(each) for name, each in questions.probes.items()}
    return Answers(probes=probes, text=text, others=others, metrics=metrics)


def _with(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


def probe(spec: Mapping[str, Any]) -> str:
    """As kubelet does it: a new connection, one call of Check, in plain text."""
    with grpc.insecure_channel(f"127.0.0.1:{spec['port']}") as channel:
        request = health_pb2.HealthCheckRequest(service=spec.get("service", ""))
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_S, wait_for_ready=False).status
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def _channel(questions: Questions) -> grpc.Channel:
    address = f"127.0.0.1:{questions.port}"
    if not questions.authority:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(questions.authority.encode()))


if __name__ == "__main__":
    asked = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Questions)
    sys.stdout.write(msgspec.json.encode(ask(asked)).decode())
