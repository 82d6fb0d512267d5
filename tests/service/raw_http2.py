"""A client that speaks HTTP/2 frame by frame, and so can do what no gRPC client does."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from tests.service.fake_engine import TIMEOUT_S

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
REFUSED_STREAM, ENHANCE_YOUR_CALM = 7, 11
MAX_WINDOW: Final = 0x7FFFFFFF
_INITIAL_WINDOW: Final = 4  # the setting's number
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Frame:
    """One frame: its type, flags, stream (0: the connection) and payload."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class RawClient:
    """A connection to a port of this machine, greeted as HTTP/2 wants it unless told otherwise."""

    def __init__(
        self,
        port: int,
        *,
        greets: bool = True,
        tls: ssl.SSLContext | None = None,
        window: int = 65_535,
        takes_bytes: int = 0,
        source: str = "",
    ) -> None:
        """window: bytes of each stream that the server may send before more are granted. takes_bytes: of the socket's
        own buffer, about; 0 is as many as the system gives. source: the client's own address; empty: any."""
        self._socket = socket.socket()
        self._socket.settimeout(TIMEOUT_S)
        if takes_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes_bytes)
        if source:
            self._socket.bind((source, 0))
        self._say: Callable[[bytes], object] = self._said
        self._left = b""
        self._next_stream = 1
        try:
            self._socket.connect(("127.0.0.1", port))
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket)
            if greets:
                self._say(_PREFACE)
                self.send(SETTINGS, struct.pack(">HI", _INITIAL_WINDOW, window))
        except OSError:  # it was closed at once
            self.close()
            raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def detach(self, take: Callable[[bytes], object]) -> socket.socket:
        """For a reader of its own: the socket, what was read of it and not looked at going to `take`."""
        take(self._left)
        self._left = b""
        return self._socket

    @classmethod
    def recorded(cls, said: bytearray) -> RawClient:
        """A client without a connection: what it says, from the preface on, is added to `said`."""
        client = cls.__new__(cls)
        client._say = said.extend
        client._left, client._next_stream = b"", 1
        said += _PREFACE
        client.send(SETTINGS)
        return client

    def send(self, kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0, times: int = 1) -> None:
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
        self._say((head + payload) * times)

    def begin(self, method: str, headers: Mapping[str, str | None] | None = None) -> int:
        """Headers of a call, and nothing behind them. None: without that header. Returns the stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        named = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/runahead.v1.GenerationService/{method}",
            ":authority": "127.0.0.1",
            "te": "trailers",
            "content-type": "application/grpc",
            **(headers or {}),
        }
        block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in named.items() if value is not None)
        self.send(HEADERS, block, END_HEADERS, stream)
        return stream

    def grant(self, stream: int, window: int) -> None:
        """The server may send so many bytes more; stream 0: over the whole connection."""
        self.send(WINDOW_UPDATE, struct.pack(">I", window), stream=stream)

    def messages_of(self, stream: int, count: int) -> list[bytes]:
        """The next messages of a call. What comes for others meanwhile is dropped."""
        data, found = b"", list[bytes]()
        while len(found) < count:
            data += self.frames_until(DATA, stream)[-1].payload
            while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5])):
                found.append(data[5:end])
                data = data[end:]
        return found

    def message(self, stream: int, data: bytes, *, ends: bool, says: int | None = None, flag: int = 0) -> None:
        """A message of a call. says: how long it claims to be. flag: 1 claims that it is compressed."""
        length = len(data) if says is None else says
        self.send(DATA, bytes([flag]) + struct.pack(">I", length) + data, END_STREAM if ends else 0, stream)

    def _said(self, data: bytes) -> None:
        self._socket.sendall(data)

    def data(self, stream: int, data: bytes, *, ends: bool) -> None:
        """The rest of a message."""
        self.send(DATA, data, END_STREAM if ends else 0, stream)

    def frames_until(self, kind: int, stream: int | None = None) -> list[Frame]:
        """What comes, up to the first frame of a kind, and of a stream if one is given.

        Raises EOFError where the connection ends before.
        """
        found = []
        while True:
            found.append(self.next_frame())
            if found[-1].kind == kind and stream in (None, found[-1].stream):
                return found

    def status_of(self, stream: int) -> Frame:
        """The headers that end a call, which say with which status."""
        while True:
            frame = self.frames_until(HEADERS, stream)[-1]
            if frame.flags & END_STREAM:
                return frame

    def wait_heard(self) -> None:
        """Returns when the other side has taken all that was sent, and answers. Raises EOFError if it has closed the
        connection."""
        self.send(PING, b"hear me?")
        while True:
            frame = self.frames_until(PING)[-1]
            if frame.flags & ACK and frame.payload == b"hear me?":
                return

    def wait_closed(self) -> bytes:
        """Returns when the other side has closed the connection: what all that came until then carried."""
        said = b""
        try:
            while True:
                frame = self.next_frame()
                if frame.kind != PING:
                    said += frame.payload
        except (EOFError, ConnectionError):
            return said

    def next_frame(self) -> Frame:
        """Raises EOFError where the connection has ended."""
        head = self._take(9)
        length = struct.unpack(">I", b"\x00" + head[:3])[0]
        stream = struct.unpack(">I", head[5:9])[0]
        return Frame(head[3], head[4], stream, self._take(length))

    def _take(self, count: int) -> bytes:
        while len(self._left) < count:
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError("the server has closed the connection")
            self._left += data
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def _text(text: str) -> bytes:
    """A literal of HPACK (RFC 7541), without compression. Lone surrogates stand for bytes that are no UTF-8."""
    data = text.encode(errors="surrogateescape")
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, b"\x7f"
    while rest >= 128:
        size, rest = size + bytes([rest % 128 | 128]), rest // 128
    return size + bytes([rest]) + data
