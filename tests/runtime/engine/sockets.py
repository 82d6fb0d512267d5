"""Front ends of a test, at the other end of the engine's sockets."""

from __future__ import annotations

import socket
from pathlib import Path

from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader

INFO = m.EngineInfo("m", "a", 10, 20, (1,), -1, 2, 3, 4, 16, 2, "cpu", "float32", 5)
WELCOME = m.Welcome(m.PROTOCOL_VERSION, "server", INFO)


class Clock:
    """Seconds, which pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def connect(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(tmp_path / "engine"))
    return sock


def until(links: SocketLinks, count: int) -> list[tuple[int, m.ToEngine | None]]:
    """Take what arrives until there are `count` messages."""
    arrived: list[tuple[int, m.ToEngine | None]] = []
    for _ in range(100):
        links.wait(0.1)
        arrived += list(links.receive())
        if len(arrived) >= count:
            return arrived
    raise AssertionError(f"{len(arrived)} of {count} messages arrived")


def read(sock: socket.socket) -> m.ToFrontEnd:
    reader = FrameReader()
    bodies: list[bytes] = []
    while not bodies:
        bodies = reader.feed(sock.recv(1))
    return m.decode_to_front_end(bodies[0])
