"""Frames of a byte stream: a little-endian uint32 length, then the body.

Used between the engine and its front ends (`runahead.runtime.wire.messages`), and the engine and its mask worker.
"""

from __future__ import annotations

import struct
from typing import Final

MAX_FRAME_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")


class ProtocolError(RuntimeError):
    """The other side violated the protocol."""


def framed(body: bytes) -> bytes:
    """Encode length and body, ready to send."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into frame bodies. limit: bytes of the next frame."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._start = 0  # of the untaken part

    def feed(self, data: bytes) -> list[bytes]:
        """Add data and return completed bodies. Raises ProtocolError for a frame over the limit."""
        self.add(data)
        bodies: list[bytes] = []
        while (body := self.take()) is not None:
            bodies.append(body)
        return bodies

    def add(self, data: bytes) -> None:
        """Add data."""
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next body, None if incomplete. Raises ProtocolError for a frame over the limit."""
        if not self.has_frame:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if length > self.limit:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.limit}")
        begin = self._start + _LENGTH.size
        self._start = begin + length
        with memoryview(self._buffer) as view:
            return bytes(view[begin : self._start])

    @property
    def has_frame(self) -> bool:
        """Whether `take` would return a body or raise."""
        there = len(self._buffer) - self._start - _LENGTH.size
        if there < 0:
            return False
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        return bool(there >= length or length > self.limit)
