"""The service config that README gives to clients does what is said of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from runahead.service.contract.errors import ServiceError, exhausted, shutting_down
from runahead.service.servicers.servicer import GenerationServicer
from runahead.v1 import GenerateRequest, GenerationServiceStub, GetModelInfoRequest
from tests.project.repository import ROOT
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, failure
from tests.service.running_service import Service

README = (ROOT / "README.md").read_text(encoding="utf-8")


def service_config() -> str:
    (block,) = re.findall(r"^```json\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return json.dumps(json.loads(block))


@pytest.mark.parametrize(
    ("error", "attempts"),
    [(shutting_down(), 4), (exhausted("QUEUE_FULL", "full", 0.01), 1), (ServiceError("UNEXPECTED", "failed"), 1)],
    ids=["unavailable", "exhausted", "internal"],
)
@pytest.mark.parametrize("method", ["GetModelInfo", "Generate"])
def test_a_client_tries_again_after_unavailable_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch, method: str, error: ServiceError, attempts: int
) -> None:
    tried = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise error

    monkeypatch.setattr("runahead.service.servicers.servicer.model_info", refuse)
    monkeypatch.setattr("runahead.service.servicers.servicer.check_known", refuse)
    monkeypatch.setattr(GenerationServicer, "_reserved", refuse)
    options = [("grpc.service_config", service_config()), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{service.port}", options) as channel:
        stub: Any = GenerationServiceStub(channel)
        if method == "Generate":
            call = failure(lambda: list(stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)))
        else:
            call = failure(lambda: stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S))
    assert (code(call), len(tried)) == (error.code, attempts)


def test_calls_are_spread_over_the_servers_behind_a_name(service: Service, tmp_path: Path) -> None:
    (folder := tmp_path / "another").mkdir()
    with Service(FakeEngine(folder / "engine.sock"), folder / "engine.sock") as other:
        addresses = f"ipv4:127.0.0.1:{service.port},127.0.0.1:{other.port}"
        with grpc.insecure_channel(addresses, [("grpc.service_config", service_config())]) as channel:
            stub = GenerationServiceStub(channel)
            while service.engine.submitted.empty() or other.engine.submitted.empty():
                call = stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
                next(call)
                call.cancel()
