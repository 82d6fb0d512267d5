"""Messages of `grpc.health.v1.Health/List`, which gRPC's health stubs before 1.85 lack.

Source: gRPC's health.proto, which gained the method later.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2

METHOD: Final = "List"
_Field = descriptor_pb2.FieldDescriptorProto


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
