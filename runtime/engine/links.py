"""The engine's side of the Unix sockets to its front ends, and the order in which messages are read.

Only `wait` blocks. A connection is not trusted: it must send its Hello in time, its frames are bounded before they are
read, and a turn of the loop reads a bounded number of connections.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from runahead.runtime.engine.submit_check import check_message, frame_bound
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader, ProtocolError

HELLO_BYTES: Final = 64  # of a frame before the Hello; a longer frame is not a front end's
_READ_BYTES: Final = 1 << 16  # bytes of one read, so that copying never delays the loop for long

MAX_UNSENT_BYTES: Final = 8 << 20  # a front end that leaves more unread is closed
HELLO_S: Final = 1.0  # for a Hello, after connecting
READS: Final = 64  # connections read in a turn
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ROOM_S: Final = 1.0  # before the next attempt to accept, when descriptors have run out


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


class Links(Protocol):
    """The front ends, as the loop uses them."""

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        """Yield what has arrived as (front end, message); None: the front end is gone. Never blocks.

        Messages that the caller does not take come with the next call, in the same order for each front end.
        """

    @property
    def has_more(self) -> bool:
        """Return whether `receive` would yield something that had arrived at its last call."""

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        """Send a message. Never blocks: a front end that does not keep up is closed."""

    def beat(self, now: float) -> None:
        """Tell front ends from time to time that the loop turns. now: seconds on the engine's clock."""

    def wake_fds(self) -> Sequence[int]:
        """Return descriptors that become readable when something arrives."""

    def wait(self, timeout_s: float) -> None:
        """Block until something arrives, while nothing is in flight."""


class SocketLinks:
    """Front ends connected to a Unix socket at `path`, which is created here.

    welcome: the answer to a Hello. refuse: called with the number of each front end whose connection is closed from
    here, and the reason, which repeats nothing of a prompt. parent_fd: a descriptor that ends when the parent process
    dies; `parent_gone` then returns True. connected: the number before the first front end's. clock: seconds, the
    engine's and its front ends'.
    """

    def __init__(
        self,
        path: Path,
        welcome: m.Welcome,
        refuse: Callable[[int, str], None],
        parent_fd: int | None = None,
        *,
        connected: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._welcome = welcome
        self._refuse = refuse
        self._clock = clock
        self._parent_gone = False
        self._connections: dict[int, Connection] = {}  # by the front ends' numbers
        self._round_robin: RoundRobin[Connection] = RoundRobin()  # connections with messages
        self._strangers: deque[Connection] = deque()  # connections without a Hello at the last check, oldest first
        self._next_owner = connected + 1
        self._frame_bound = frame_bound(welcome.info)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._beaten_at = clock()
        self._deaf_until = 0.0  # no connection is accepted until then; 0: accept now
        self._selector = selectors.DefaultSelector()
        self._wake_fds = (self._selector.fileno(),)
        self._selector.register(self._listener, EVENT_READ)
        if parent_fd is not None:
            self._selector.register(parent_fd, EVENT_READ)

    # ------------------------------------------------------------ the loop's side

    def beat(self, now: float) -> None:
        if now - self._beaten_at >= m.HEARTBEAT_S:
            self._beaten_at = now
            self.broadcast(m.Heartbeat())

    def wake_fds(self) -> Sequence[int]:
        return self._wake_fds

    def wait(self, timeout_s: float) -> None:
        self._selector.select(timeout_s)

    def parent_gone(self) -> bool:
        return self._parent_gone

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        readable: list[Connection] = []
        for key, events in self._selector.select(0):
            if isinstance(key.data, Connection):
                if events & EVENT_WRITE:
                    self._flush(key.data)
                if events & EVENT_READ and not key.data.has_more:
                    readable.append(key.data)
            elif key.fileobj is self._listener:
                self._accept()
            elif not os.read(key.fd, 4096):
                self._parent_gone = True
                self._selector.unregister(key.fd)
        if len(readable) > READS:  # connections that have waited longest
            readable = nsmallest(READS, readable, key=lambda connection: connection.read_at)
        for connection in readable:
            self._read(connection)
        if self._strangers:
            self._drop_silent_strangers()
        if self._deaf_until:
            self._listen_again()
        return self._messages()

    @property
    def has_more(self) -> bool:
        return bool(self._round_robin.gone) or any(
            connection.has_more for connection in self._round_robin.lanes.values()
        )

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        connection = self._connections.get(owner)
        if connection is None or connection.ended:
            return
        connection.unsent += m.encode_frame(message)
        self._flush(connection)
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            self._refuse(owner, f"a front end left more than {MAX_UNSENT_BYTES} bytes unread")
            self._lose(connection)

    def broadcast(self, message: m.ToFrontEnd) -> None:
        """Send a message to every front end that has greeted."""
        for connection in list(self._connections.values()):
            if connection.greeted:
                self.send(connection.owner, message)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left, as far as it is taken in time, and close."""
        for connection in self._connections.values():
            connection.sock.settimeout(timeout_s)
            with contextlib.suppress(OSError):  # the front end is gone
                connection.sock.sendall(connection.unsent)
            connection.sock.close()
        self._connections.clear()
        self._selector.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    # ------------------------------------------------------------ sockets

    def _accept(self) -> None:
        owner = self._next_owner
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:  # otherwise every turn would try again
                self._refuse(owner, f"there is no descriptor for its connection: {error.strerror}")
                self._selector.unregister(self._listener)
                self._deaf_until = self._clock() + _ROOM_S
            return  # or the connection has gone again
        self._next_owner += 1
        sock.setblocking(False)
        connection = self._connections[owner] = Connection(owner, sock, self._clock())
        self._strangers.append(connection)
        self._selector.register(sock, EVENT_READ, connection)

    def _listen_again(self) -> None:
        if self._clock() >= self._deaf_until:
            self._deaf_until = 0.0
            self._selector.register(self._listener, EVENT_READ)

    def _drop_silent_strangers(self) -> None:
        """Close connections that sent no Hello in time."""
        now = self._clock()
        while self._strangers:
            oldest = self._strangers[0]
            if not (oldest.greeted or oldest.ended):
                if now - oldest.connected_at < HELLO_S:
                    return
                if not oldest.has_more:  # otherwise its message is about to be read
                    self._refuse(oldest.owner, f"it said no Hello within {HELLO_S:g} s")
                    self._lose(oldest)
            self._strangers.popleft()

    def _read(self, connection: Connection) -> None:
        if not connection.read(self._clock()):
            self._end(connection)
        if connection.has_more:
            self._round_robin.lanes[connection.owner] = connection

    def _messages(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        lanes = self._round_robin.lanes
        for owner in [owner for owner, connection in lanes.items() if not connection.has_more]:
            del lanes[owner]
        return self._round_robin.take(self._next_of, lambda connection: connection.reader.has_frame)

    def _next_of(self, owner: int, connection: Connection) -> m.ToEngine | None:
        """Return the next message of a connection, or None. The connection is lost at its end, or at once for an
        invalid message."""
        try:
            while (body := connection.reader.take()) is not None:
                message = m.decode_to_engine(body)
                if not isinstance(message, m.Hello):
                    self._check(connection, message)
                    return connection.dated(message)
                self._greet(connection, message)
        except ProtocolError as error:
            self._refuse(owner, str(error))
            self._lose(connection)
        if connection.ended:
            self._lose(connection)
        return None

    def _check(self, connection: Connection, message: m.ToEngine) -> None:
        """Raise ProtocolError for a message that no front end may send."""
        if not connection.greeted:
            raise ProtocolError("a front end spoke before its Hello")
        check_message(message, self._welcome.info, connection.last_handle, connection.announced)
        match message:
            case m.Announce(handle=handle, n=n):
                connection.last_handle = handle + n - 1
                connection.announced[handle] = n
            case m.Submit(handle=handle, n=n):
                connection.last_handle = max(handle + n - 1, connection.last_handle)
                connection.announced.pop(handle, None)
            case m.Cancel(handle=handle):
                connection.announced.pop(handle, None)

    def _greet(self, connection: Connection, hello: m.Hello) -> None:
        if connection.greeted:
            raise ProtocolError("a front end said Hello twice")
        self.send(connection.owner, self._welcome)
        if hello.protocol != self._welcome.protocol:
            raise ProtocolError(f"a front end speaks protocol {hello.protocol}, not {self._welcome.protocol}")
        connection.greet(self._frame_bound)

    def _flush(self, connection: Connection) -> None:
        """Send what the socket takes; the rest is sent when there is room again."""
        try:
            connection.flush()
        except OSError:
            self._end(connection)
            return
        if bool(connection.unsent) != connection.is_full:
            connection.is_full = bool(connection.unsent)
            events = EVENT_READ | EVENT_WRITE if connection.is_full else EVENT_READ
            self._selector.modify(connection.sock, events, connection)

    def _end(self, connection: Connection) -> None:
        """Record that the other end is gone. Its earlier messages are still applied."""
        if not connection.ended:
            connection.ended = True
            connection.unsent.clear()
            self._selector.unregister(connection.sock)
            self._round_robin.lanes.setdefault(connection.owner, connection)

    def _lose(self, connection: Connection) -> None:
        if self._connections.pop(connection.owner, None) is not None:
            self._end(connection)
            connection.reader = FrameReader()  # drops the rest of its messages
            connection.sock.close()
            self._round_robin.lanes.pop(connection.owner, None)
            self._round_robin.gone.append(connection.owner)
