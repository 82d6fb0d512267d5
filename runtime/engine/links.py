"""The engine's ends of the Unix sockets to its front ends. Nothing here ever blocks but `wait`."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from runahead.runtime.engine.submit_check import check_message
from runahead.runtime.engine.turns import Turns
from runahead.runtime.wire import messages as m

# Connections at a time; more are refused. A server has one, and a tool beside it another. `select`, by which the loop
# and the devices wait, takes no descriptor above 1,023: without a bound, connections could end the engine.
MAX_FRONT_ENDS: Final = 64
MAX_UNSENT_BYTES: Final = 8 << 20  # a front end that leaves more undrained is gone
_READ_BYTES: Final = 1 << 16  # at a time: what is copied is not the loop's to wait for


class Links(Protocol):
    """The front ends, as the loop sees them."""

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        """What has arrived, as (front end, message); None: that front end is gone. Never blocks.

        What is not taken from it comes with the next call, in the same order for each front end.
        """

    @property
    def has_more(self) -> bool:
        """`receive` would give something that had arrived when it was last called."""

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        """Never blocks: a front end that does not keep up is gone."""

    def wake_fds(self) -> Sequence[int]:
        """Descriptors that become readable when something arrives."""

    def wait(self, timeout_s: float) -> None:
        """Block until something arrives, while nothing is in flight."""


class _Connection:
    """One front end's socket, what it has sent of a frame, and what it has not taken yet."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.connected_at = self.read_at = now  # seconds; all complete frames that the reader has came at `read_at`
        self.reader = m.FrameReader()
        self.unsent = bytearray()
        self.greeted = False
        self.ended = False
        self.last_handle = 0  # of its requests: they count up

    def dated(self, message: m.ToEngine) -> m.ToEngine:
        """With the time from which a request's latencies count: as its front end says, within what was seen here."""
        if not isinstance(message, m.Submit):
            return message
        said = self.read_at if message.submitted_at is None else message.submitted_at
        # Both give their first argument where the other is a NaN.
        return msgspec.structs.replace(message, submitted_at=max(self.connected_at, min(self.read_at, said)))

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError if the other side is gone."""
        while self.unsent:
            try:
                sent = self.sock.send(self.unsent)
            except BlockingIOError:
                return
            del self.unsent[:sent]


class SocketLinks:
    """Front ends connected to a Unix socket at `path`, which is made here.

    welcome: the answer to a front end's Hello. refuse: told of each front end whose connection is closed from here, by
    its number, and why, in a sentence that repeats nothing of a prompt. parent_fd: a descriptor that reaches its end
    when the parent process dies; `parent_gone` then says so. connected: the number after which front ends are counted.
    clock: seconds, the engine's, and that of its front ends.
    """

    def __init__(
        self,
        path: Path,
        welcome: Callable[[], m.Welcome],
        refuse: Callable[[int, str], None],
        parent_fd: int | None = None,
        *,
        connected: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._welcome = welcome
        self._refuse = refuse
        self._parent_fd = parent_fd
        self._clock = clock
        self.parent_gone = False
        self._turns: Turns[_Connection] = Turns()
        self._connections = self._turns.lanes  # by the front ends' numbers
        self._next_owner = connected + 1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._poll = select.poll()
        self._fds: list[int] = []  # those that are watched
        self._watch(self._listener.fileno())
        if parent_fd is not None:
            self._watch(parent_fd)

    # ------------------------------------------------------------ the loop's side

    def wake_fds(self) -> Sequence[int]:
        return self._fds

    def wait(self, timeout_s: float) -> None:
        unsent = [c.sock.fileno() for c in self._connections.values() if c.unsent]
        select.select(self.wake_fds(), unsent, [], timeout_s)

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        readable = {fd for fd, _ in self._poll.poll(0)}
        for fd in readable:
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._parent_fd and not os.read(fd, 4096):
                self.parent_gone = True
                self._unwatch(fd)
        for connection in self._connections.values():
            if connection.sock.fileno() in readable and not connection.reader.has_frame:
                self._read(connection)
            if connection.unsent:
                self._try_flush(connection)
        return self._messages()

    @property
    def has_more(self) -> bool:
        return bool(self._turns.gone) or any(c.ended or c.reader.has_frame for c in self._connections.values())

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        connection = self._connections.get(owner)
        if connection is None or connection.ended:
            return
        connection.unsent += m.encode_frame(message)
        self._try_flush(connection)
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            self._refuse(owner, f"a front end left more than {MAX_UNSENT_BYTES} bytes unread")
            self._lose(owner)

    def broadcast(self, message: m.ToFrontEnd) -> None:
        """To every front end."""
        for owner in list(self._connections):
            self.send(owner, message)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left, as far as it is taken in time, and close."""
        for connection in self._connections.values():
            connection.sock.settimeout(timeout_s)
            with contextlib.suppress(OSError):  # the front end is gone: there is nobody to tell
                connection.sock.sendall(connection.unsent)
            connection.sock.close()
        self._connections.clear()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    # ------------------------------------------------------------ sockets

    def _watch(self, fd: int) -> None:
        """The loop wakes when it is readable, or at its end."""
        self._poll.register(fd, select.POLLIN)
        self._fds = [*self._fds, fd]

    def _unwatch(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._fds = [other for other in self._fds if other != fd]

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has gone again, or there is no descriptor for it now: the listener stays readable
        owner = self._next_owner
        self._next_owner += 1
        if len(self._connections) >= MAX_FRONT_ENDS:
            sock.close()
            self._refuse(owner, f"{MAX_FRONT_ENDS} front ends are connected already, as many as may be")
            return
        sock.setblocking(False)
        self._watch(sock.fileno())
        self._connections[owner] = _Connection(sock, self._clock())

    def _read(self, connection: _Connection) -> None:
        """Some of what the socket has: no more than that is kept beside a frame that is not complete."""
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            connection.reader.add(data)
            connection.read_at = self._clock()
        else:
            self._end(connection)

    def _messages(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        return self._turns.take(self._next_of, lambda connection: connection.reader.has_frame)

    def _next_of(self, owner: int, connection: _Connection) -> m.ToEngine | None:
        """Its next message; None where there is none. It is lost at its end, or at once for what it says."""
        try:
            while (body := connection.reader.take()) is not None:
                message = m.decode_to_engine(body)
                if not isinstance(message, m.Hello):
                    self._check(connection, message)
                    return connection.dated(message)
                self._greet(owner, connection, message)
        except m.ProtocolError as error:
            self._refuse(owner, str(error))
            self._lose(owner)
        if connection.ended:
            self._lose(owner)
        return None

    def _check(self, connection: _Connection, message: m.ToEngine) -> None:
        """Raises ProtocolError for what no front end may say."""
        if not connection.greeted:
            raise m.ProtocolError("a front end spoke before its Hello")
        check_message(message, self._welcome().info, connection.last_handle)
        if isinstance(message, m.Submit):
            connection.last_handle = message.handle

    def _greet(self, owner: int, connection: _Connection, hello: m.Hello) -> None:
        welcome = self._welcome()
        if connection.greeted:
            raise m.ProtocolError("a front end said Hello twice")
        self.send(owner, welcome)
        if hello.protocol != welcome.protocol:
            raise m.ProtocolError(f"a front end speaks protocol {hello.protocol}, not {welcome.protocol}")
        connection.greeted = True

    def _try_flush(self, connection: _Connection) -> None:
        try:
            connection.flush()
        except OSError:
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """Nobody is at its other end any more. What it had said is still to be done."""
        if not connection.ended:
            connection.ended = True
            connection.unsent.clear()
            self._unwatch(connection.sock.fileno())

    def _lose(self, owner: int) -> None:
        connection = self._connections.pop(owner, None)
        if connection is not None:
            self._end(connection)
            connection.reader = m.FrameReader()  # whatever else it has said
            connection.sock.close()
            self._turns.gone.append(owner)
