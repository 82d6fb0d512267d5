"""A collector of OpenTelemetry spans: a real server of OTLP over gRPC, which keeps what it is sent."""

from __future__ import annotations

import queue
import threading
from concurrent import futures
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.service.fake_engine import TIMEOUT_S


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`answers` is set: it answers nobody while it is not. `asked`: somebody has sent something."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.received: list[Any] = []  # whole messages
        self._spans: queue.Queue[Any] = queue.Queue()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.answers.set()
        self._server.stop(None).wait(TIMEOUT_S)

    def Export(self, request: Any, context: object) -> Any:
        self.asked.set()
        self.answers.wait(TIMEOUT_S)
        self.received.append(request)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._spans.put(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, count: int) -> dict[str, Any]:
        """The next spans, by name."""
        found = [self._spans.get(timeout=TIMEOUT_S) for _ in range(count)]
        return {span.name: span for span in found}


def attributes(span: Any) -> dict[str, Any]:
    """By name, as plain values."""
    return {entry.key: _plain(entry.value) for entry in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)
