"""Calls of the facade, as a router makes them, to a front end over a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from runahead.service.calls.admission import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.servers.supervised import Security
from runahead.service.settings.settings import FrontEndSettings
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.running_service import Service
from tests.service.small_tokenizers import byte_level_tokenizer

SERVICE = "vllm.grpc.engine.VllmEngine"
SERVED = ("Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer")
ALL = [method.name for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods]
ALICE, BOB, OPS = ("alice-token-0123456789", "bob-token-0123456789", "ops-token-0123456789")


@contextmanager
def served(folder: Path, callers: str = "", *, kv_events: bool = False, **options: Any) -> Iterator[Service]:
    path, security = folder / "engine.sock", Security(Access(), None)
    if callers:
        (folder / "callers").write_text(callers)
        security = Security(Access(CallersFile(folder / "callers")), None)
    settings = FrontEndSettings(vllm_facade=True, kv_events=kv_events)
    with Service(FakeEngine(path), path, settings=settings, security=security, **options) as running:
        yield running


def stub(service: Service) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(service.channel)


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text).ids


def request(stream: bool = True, request_id: str = "r-1", **params: Any) -> Any:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="once", input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def generate(service: Service, asked: Any = None, metadata: Any = None) -> Any:
    return stub(service).Generate(asked or request(), timeout=TIMEOUT_S, metadata=metadata)


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]
