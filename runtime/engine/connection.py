"""The sockets of front ends, as the engine holds them, and whose turn it is to be heard."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader

HELLO_BYTES: Final = 64  # of a frame before the greeting: whoever says more is no front end
_READ_BYTES: Final = 1 << 16  # at a time: what is copied is not the loop's to wait for


class Connection:
    """A socket that never blocks. now: when it was accepted, in seconds on the engine's clock."""

    def __init__(self, owner: int, sock: socket.socket, now: float) -> None:
        self.owner = owner
        self.sock = sock
        self.connected_at = self.read_at = now  # seconds; all complete frames that the reader has came at `read_at`
        self.reader = FrameReader(HELLO_BYTES)
        self.unsent = bytearray()
        self.is_full = False  # the socket took not all of it: whoever watches it waits for room
        self.greeted = False
        self.ended = False
        self.last_handle = 0  # of its requests: they count up
        # n by handle, of requests that are announced and neither submitted nor cancelled
        self.announced: dict[int, int] = {}

    @property
    def has_more(self) -> bool:
        """There is a message to take, or its end to be told."""
        return self.ended or self.reader.has_frame

    def greet(self, frame_bytes: int) -> None:
        """It has said its Hello: from now on its frames may have so many bytes."""
        self.greeted = True
        self.reader.limit = frame_bytes

    def read(self, now: float) -> bool:
        """Some of what the socket has: no more than that is kept beside a frame that is not complete. False at its
        end."""
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
        """With the time from which a request's latencies count: as its front end says, within what was seen here."""
        if not isinstance(message, m.Submit | m.Announce):
            return message
        said = self.read_at if message.submitted_at is None else message.submitted_at
        # Both give their first argument where the other is a NaN.
        return msgspec.structs.replace(message, submitted_at=max(self.connected_at, min(self.read_at, said)))


Lane = TypeVar("Lane")
Said = TypeVar("Said")


class Turns(Generic[Lane]):
    """Who may speak, in the order of their turns, and who is gone.

    lanes: by front end, whatever its messages are taken from. A new one comes last. gone: front ends of which the next
    message is that they are gone; they are heard of before the others.
    """

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.gone: deque[int] = deque()

    def take(
        self, next_of: Callable[[int, Lane], Said | None], has_more: Callable[[Lane], bool]
    ) -> Iterator[tuple[int, Said | None]]:
        """One message of each front end in turn, for as long as there are any, and (front end, None) for who is gone.

        Whoever has had its turn goes behind the others, also for the next call, which may come before all had theirs.

        next_of: takes the next message of a front end, by its number and lane; None where there is none. It may remove
        lanes, and say who is gone. has_more: whether a lane may have another message now.
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
