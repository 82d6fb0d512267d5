"""Finds the path of each malformed field in a message's bytes.

The protobuf library only says that it can't parse. This walks the bytes along the message's descriptor and the encoding
of https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from runahead.service.contract.errors import Violation

MALFORMED_SENTENCE: Final = "the request's bytes are not a message of this method's type"

_MOST_FIELDS: Final = 4096  # walked; a larger message takes too long
_MOST_DEPTH: Final = 8  # nesting of messages; the contract has three
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_VARINT_BYTES: Final = 10
_EIGHT: Final = frozenset({FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64})
_FOUR: Final = frozenset({FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32})
_TEXTS: Final = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE})


class _CutOff(ValueError):
    """The bytes end too early, or a tag is impossible."""


def wire_faults(descriptor: Any, data: bytes, most: int) -> list[Violation]:
    """Return the first `most` malformed fields of bytes that the descriptor's type can't parse, or the request itself
    if no field can be named.
    """
    found: list[Violation] = []
    for fault in _Walk().faults(descriptor, data, "", 0):
        found.append(fault)
        if len(found) == most:
            break
    return found or [Violation("request", MALFORMED_SENTENCE)]


def wire_type_of(field: Any) -> int:
    """Return the wire type of a field outside packed lists."""
    if field.type in _TEXTS:
        return _LENGTH
    if field.type in _EIGHT:
        return _EIGHT_BYTES
    return _FOUR_BYTES if field.type in _FOUR else _VARINT


class _Walk:
    """One walk through a message."""

    def __init__(self) -> None:
        self._fields = 0

    def faults(self, descriptor: Any, data: bytes, path: str, depth: int) -> Iterator[Violation]:
        """Yield malformed fields. path: of this message, ending in a dot; empty for the request."""
        at = 0
        counts: dict[int, int] = {}  # occurrences by field number
        here = path.removesuffix(".") or "request"
        while at < len(data):
            self._fields += 1
            if self._fields > _MOST_FIELDS or depth > _MOST_DEPTH:
                yield Violation(here, f"{here} holds too much to be looked through, and something in it is malformed")
                return
            try:
                tag, at = _varint(data, at)
                number, wire_type = tag >> 3, tag & 7
                field = descriptor.fields_by_number.get(number)
                name = f"{path}{field.name if field else number}"
                if not number or wire_type not in (_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES):
                    raise _CutOff
            except _CutOff:
                yield Violation(here, f"{here} has bytes behind its last whole field that begin no other")
                return
            if field is not None and field.is_repeated and not _is_packed(field, wire_type):
                name += f"[{counts.get(number, 0)}]"
                counts[number] = counts.get(number, 0) + 1
            try:
                value, at = _value(data, at, wire_type)
            except _CutOff:
                yield Violation(name, f"{name} is cut off: the request ends inside it")
                return
            if field is not None:
                yield from self._in_field(field, wire_type, value, name, depth)

    def _in_field(self, field: Any, wire_type: int, value: bytes, name: str, depth: int) -> Iterator[Violation]:
        if wire_type != _LENGTH:
            return
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode()
            except UnicodeDecodeError as error:
                yield Violation(name, f"{name} is not UTF-8 from its byte {error.start} on")
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from self.faults(field.message_type, value, f"{name}.", depth + 1)
        elif _is_packed(field, wire_type) and not _holds_numbers(value, wire_type_of(field)):
            yield Violation(name, f"{name} is no list of numbers: its last one is cut off, or one has too many bytes")


def _is_packed(field: Any, wire_type: int) -> bool:
    """Whether the value is a packed list of numbers."""
    return bool(field.is_repeated) and wire_type == _LENGTH and wire_type_of(field) != _LENGTH


def _holds_numbers(value: bytes, wire_type: int) -> bool:
    if wire_type != _VARINT:
        return len(value) % (8 if wire_type == _EIGHT_BYTES else 4) == 0
    ends = np.flatnonzero(np.frombuffer(value, np.uint8) < 0x80)  # the last byte of each number
    if not len(value):
        return True
    if not len(ends) or ends[-1] != len(value) - 1:
        return False
    return int(np.diff(ends, prepend=-1).max()) <= _VARINT_BYTES


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint and return it with the next offset. Raises _CutOff."""
    number = 0
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        if at >= len(data):
            raise _CutOff
        byte, at = data[at], at + 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise _CutOff


def _value(data: bytes, at: int, wire_type: int) -> tuple[bytes, int]:
    """Read a field's bytes and return them with the next offset. Raises _CutOff."""
    begin = at
    if wire_type == _VARINT:
        _, end = _varint(data, at)
    elif wire_type == _LENGTH:
        size, begin = _varint(data, at)
        end = begin + size
    else:
        end = begin + (8 if wire_type == _EIGHT_BYTES else 4)
    if end > len(data):
        raise _CutOff
    return data[begin:end], end
