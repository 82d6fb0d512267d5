"""What tests ask the ports beside the service's own."""

from __future__ import annotations

import urllib.request

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.service.fake_engine import TIMEOUT_S
from tests.service.rpc_errors import detail


def reason(error: grpc.RpcError) -> str:
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


def status(channel: grpc.Channel, name: str) -> int:
    request = HealthCheckRequest(service=name)
    return int(HealthStub(channel).Check(request, timeout=TIMEOUT_S, wait_for_ready=True).status)


def samples(port: int) -> list[Sample]:
    """All that Prometheus gets."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def scrape(port: int) -> dict[str, float]:
    """Samples without labels, and of those with labels the last."""
    return {sample.name: sample.value for sample in samples(port)}
