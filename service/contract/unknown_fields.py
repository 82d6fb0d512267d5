"""Finds a message's unknown fields and their paths."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

_UNKNOWN: Final = "is the number of a field that this server does not know"
_LENGTH: Final = 2  # wire type of length-delimited values: texts, bytes, messages, packed lists


def unknown_fields(request: Message, most_bytes: int) -> dict[str, str]:
    """Return a sentence for each unknown field by its path: `sampling.99` for an unknown number, the field's name for a
    wrong wire type.

    most_bytes: of unknown fields; above this they are not listed one by one, because naming a million takes a second.
    """
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    size = request.ByteSize() - known.ByteSize()
    if size > most_bytes:
        return {"request": f"has {size} bytes of fields that are not supported by this server"}
    found: dict[str, str] = {}
    if size:
        _walk(request, "", found)
    return found


def _walk(message: Message, path: str, found: dict[str, str]) -> None:
    fields: Any = message.DESCRIPTOR.fields_by_number
    unknown_set = UnknownFieldSet(message)
    for unknown in (unknown_set[index] for index in range(len(unknown_set))):
        field = fields.get(unknown.field_number)
        if field is None:
            found[f"{path}{unknown.field_number}"] = _UNKNOWN
        elif field.message_type is not None and unknown.wire_type == _LENGTH:
            # The library takes a map entry with one unknown field for an unknown field.
            entry: Any = GetMessageClass(field.message_type).FromString(unknown.data)
            _walk(entry, f"{path}{field.name}[{entry.key}].", found)
        else:
            found[f"{path}{field.name}"] = "is encoded as another type than the contract's"
    for field, value in message.ListFields():
        if isinstance(value, Message):
            _walk(value, f"{path}{field.name}.", found)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, entry in enumerate(value):
                _walk(entry, f"{path}{field.name}[{index}].", found)
