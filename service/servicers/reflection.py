"""Server reflection, v1 and v1alpha, so that grpcurl and buf curl need no .proto files."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from runahead.service.calls.admission import RIGHTS_FOR
from runahead.service.calls.call import HEALTH

_V1ALPHA: Final = "grpc.reflection.v1alpha"
_V1: Final = "grpc.reflection.v1"
_METHOD: Final = "ServerReflectionInfo"
_METHODS: Final = RIGHTS_FOR.keys() | HEALTH  # of every service: a method without rights is not served

REFLECTION_SERVICES: Final = (f"{_V1}.ServerReflection", f"{_V1ALPHA}.ServerReflection")


def add_reflection(
    server: grpc.aio.Server,
    files: Iterable[FileDescriptor],
    services: Iterable[str],
    not_served: Set[str] = frozenset(),
) -> None:
    """Serve `services`, their `files` and imports under both protocol versions, without methods that the server lacks.
    not_served: paths of further methods to leave out.

    Error details are described too, so that clients without .proto files can show them.

    Both versions have the same wire format; the library has v1alpha only, so v1 is the same servicer and file under
    another name.
    """
    pool = descriptor_pool.DescriptorPool()
    known, methods = set[str](), _METHODS - not_served
    for file in (*files, reflection_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR):
        _add_file(pool, file, known, methods)
    pool.AddSerializedFile(_renamed(reflection_pb2.DESCRIPTOR).SerializeToString())
    servicer = reflection.aio.ReflectionServicer((*services, *REFLECTION_SERVICES), pool=_PoolWithMethods(pool))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service in REFLECTION_SERVICES:
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {_METHOD: handler})])


class _PoolWithMethods:
    """A pool that also finds a method's file: in Python a pool has methods but does not index them as symbols."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def _add_file(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, known: set[str], methods: Set[str]) -> None:
    if file.name in known:
        return
    known.add(file.name)
    for dependency in file.dependencies:
        _add_file(pool, dependency, known, methods)
    pool.AddSerializedFile(_served(file, methods).SerializeToString())


def _served(file: FileDescriptor, methods: Set[str]) -> descriptor_pb2.FileDescriptorProto:
    """Return the file without methods that this server lacks."""
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for service in proto.service:
        path = f"/{proto.package}.{service.name}/"
        kept = [method for method in service.method if path + method.name in methods]
        del service.method[:]
        service.method.extend(kept)
    return proto


def _renamed(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    proto.name = proto.name.replace("v1alpha", "v1")
    proto.package = _V1
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:  # of a message; a scalar field must have no type name
                field.type_name = field.type_name.replace(f".{_V1ALPHA}.", f".{_V1}.")
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
            method.output_type = method.output_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
    return proto
