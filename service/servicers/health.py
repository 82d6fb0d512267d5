"""`grpc.health.v1`: serving only while the engine lives.

gRPC's health stubs before 1.85 lack the messages of `List`; they are made here as in gRPC's health.proto.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runahead.service.calls.admission import Watchers
from runahead.service.calls.call import StreamWriter

METHOD: Final = "List"
_Field = descriptor_pb2.FieldDescriptorProto

_Status = health_pb2.HealthCheckResponse


def _described() -> descriptor_pb2.FileDescriptorProto:
    package, of_stubs = health_pb2.DESCRIPTOR.package, health_pb2.DESCRIPTOR.name
    file = descriptor_pb2.FileDescriptorProto(
        name="runahead/health_list.proto", package=package, syntax="proto3", dependency=[of_stubs]
    )
    file.message_type.add(name="HealthListRequest")
    response = file.message_type.add(name="HealthListResponse")
    entry = response.nested_type.add(name="StatusesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    status = f".{package}.HealthCheckResponse"
    entry.field.add(name="value", number=2, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_OPTIONAL, type_name=status)
    response.field.add(
        name="statuses",
        number=1,
        type=_Field.TYPE_MESSAGE,
        label=_Field.LABEL_REPEATED,
        type_name=f".{package}.HealthListResponse.StatusesEntry",
    )
    return file


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))


descriptor_pool.Default().Add(_described())
HealthListRequest: Final = _message("grpc.health.v1.HealthListRequest")
HealthListResponse: Final = _message("grpc.health.v1.HealthListResponse")


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no type information
    """Two statuses: the server's (""), which means live, and its services', which means ready for calls. NOT_SERVING at
    first.

    most_watchers: open Watch calls. stalled_s: see `StreamWriter`.
    """

    def __init__(self, services: Iterable[str], most_watchers: int, stalled_s: float) -> None:
        self._services = frozenset({"", *services})
        self._serving = False
        self._is_ready = True
        self._closed = False
        self._changed = asyncio.Event()  # replaced at every change
        self._watchers = Watchers(most_watchers, "Watch")
        self._stalled_s = stalled_s

    def set_serving(self, serving: bool) -> None:
        """Set liveness and notify every watcher. No effect once closed."""
        if not self._closed:
            self._serving = serving
            self._tell()

    def set_ready(self, is_ready: bool) -> None:
        """Set readiness: whether the services take calls. Watchers are notified of a change only."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self._tell()

    def close(self) -> None:
        """Set the services NOT_SERVING for good; the server stays live until its process ends. Watchers are notified
        and their calls end, since open calls would delay a graceful stop.
        """
        self._closed = True
        self._tell()

    @property
    def is_ready(self) -> bool:
        """Whether the services take calls."""
        return self._serving and self._is_ready and not self._closed

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register all methods of the service."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        found = grpc.unary_unary_rpc_method_handler(
            self.List, HealthListRequest.FromString, HealthListResponse.SerializeToString
        )
        service = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {METHOD: found})])

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        return _Status(status=self._status(request.service))

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return HealthListResponse(
            statuses={service: _Status(status=self._status(service)) for service in self._services}
        )

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with StreamWriter(context, self._stalled_s) as writer:
            with self._watchers.watching():
                await self._watch(request.service, writer)

    async def _watch(self, service: str, writer: StreamWriter) -> None:
        """Write statuses to a watcher. Raises StalledReaderError."""
        await writer.begin()
        told: int | None = None
        while True:
            changed, closed, status = self._changed, self._closed, self._status(service)
            if status != told:
                await writer.write(_Status(status=status))
                told = status
            if closed:
                return  # with OK: an error may overtake the last status
            await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_Status.SERVICE_UNKNOWN)
        is_ready = self._is_ready and not self._closed
        return int(_Status.SERVING if self._serving and (is_ready or not service) else _Status.NOT_SERVING)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
