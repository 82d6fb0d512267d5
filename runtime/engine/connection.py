"""The engine's connections to front ends, and the order in which their messages are read."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader

HELLO_BYTES: Final = 64  # of a frame before the Hello; a longer frame is not a front end's
_READ_BYTES: Final = 1 << 16  # bytes of one read, so that copying never delays the loop for long


class Connection:
    """A socket that never blocks. now: when it was accepted, in seconds on the engine's clock."""

    def __init__(self, owner: int, sock: socket.socket, now: float) -> None:
        self.owner = owner
        self.sock = sock
        self.connected_at = self.read_at = now  # seconds; all complete frames that the reader has came at `read_at`
        self.reader = FrameReader(HELLO_BYTES)
        self.unsent = bytearray()
        self.is_full = False  # `unsent` is not empty, so the selector watches for room
        self.greeted = False
        self.ended = False
        self.last_handle = 0  # the newest handle of its requests, which count up
        # n by handle, of announced requests that are neither submitted nor cancelled
        self.announced: dict[int, int] = {}

    @property
    def has_more(self) -> bool:
        """Return whether there is a message to take or an end to report."""
        return self.ended or self.reader.has_frame

    def greet(self, frame_bytes: int) -> None:
        """Record its Hello: from now on its frames may have `frame_bytes` bytes."""
        self.greeted = True
        self.reader.limit = frame_bytes

    def read(self, now: float) -> bool:
        """Read some bytes from the socket, so that little is kept beside an incomplete frame. Returns False at the
        socket's end."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self.reader.add(data)
            self.read_at = now
        return bool(data)

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError if the other side is gone."""
        while self.unsent:
            try:
                sent = self.sock.send(self.unsent)
            except BlockingIOError:
                return
            del self.unsent[:sent]

    def dated(self, message: m.ToEngine) -> m.ToEngine:
        """Return the message with the time from which a request's latencies count: the front end's, bounded by what was
        seen here."""
        if not isinstance(message, m.Submit | m.Announce):
            return message
        said = self.read_at if message.submitted_at is None else message.submitted_at
        # Both give their first argument where the other is a NaN.
        return msgspec.structs.replace(message, submitted_at=max(self.connected_at, min(self.read_at, said)))


Lane = TypeVar("Lane")
Said = TypeVar("Said")


class RoundRobin(Generic[Lane]):
    """Front ends with messages, in the order in which they are read, and front ends that are gone.

    lanes: by front end, the source of its messages. A new one comes last. gone: front ends whose next message is that
    they are gone; they come before the others.
    """

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.gone: deque[int] = deque()

    def take(
        self, next_of: Callable[[int, Lane], Said | None], has_more: Callable[[Lane], bool]
    ) -> Iterator[tuple[int, Said | None]]:
        """Yield one message of each front end in turn while there are any, and (front end, None) for each that is gone.

        A front end whose message was yielded goes behind the others, also for the next call.

        next_of: takes the next message of a front end, by number and lane, or returns None. It may remove lanes and add
        to `gone`. has_more: whether a lane may have another message now.
        """
        left = list(self.lanes.items())
        while left or self.gone:
            while self.gone:
                yield self.gone.popleft(), None
            for owner, lane in left:
                said = next_of(owner, lane)
                if said is not None:
                    self.lanes[owner] = self.lanes.pop(owner)
                    yield owner, said
            left = [(owner, lane) for owner, lane in left if has_more(lane)]
