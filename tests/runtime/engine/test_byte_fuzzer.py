"""Bytes of any kind on the engine's socket, over several connections at once: the engine and a bystander go on."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runahead.runtime.wire import messages as m
from tests.runtime.engine.hostile_wire import Wire, submit

CONNECTIONS = 4
STEPS = 60


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    made.close()


def frames(dice: random.Random, handle: int) -> list[bytes]:
    """What a front end that behaves might say next. `Abort` of all is left out: it means the bystander too."""
    messages: list[m.ToEngine] = [
        submit(handle),
        msgspec.structs.replace(submit(handle), request_id=f"same{dice.randrange(4)}"),
        m.Cancel(dice.randrange(1, handle + 1)),
        m.Abort(handle, tuple(f"same{i}" for i in range(dice.randrange(4)))),
        m.StatsQuery(handle),
    ]
    return [m.encode_frame(message) for message in dice.sample(messages, dice.randrange(1, 4))]


def mangled(dice: random.Random, data: bytes) -> bytes:
    """The same with something wrong, or as it was."""
    changed, place = bytearray(data), dice.randrange(len(data))
    match dice.randrange(9):
        case 0:
            changed[place] ^= 1 << dice.randrange(8)
        case 1:
            changed[place] = dice.randrange(256)
        case 2:
            del changed[place : place + dice.randrange(1, 9)]
        case 3:
            changed[place:place] = dice.randbytes(dice.randrange(1, 9))
        case 4:
            changed += changed[place:]
        case 5:
            changed[:4] = dice.choice([0, 1, 63, 1 << 16, 1 << 30, (1 << 32) - 1]).to_bytes(4, "little")
        case 6:
            changed = bytearray(dice.randbytes(dice.randrange(1, 200)))
    return bytes(changed)


class Hostile:
    """Connections that say anything, in pieces of any size, and come and go."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self._path, self._dice = path, dice
        self._sockets: list[socket.socket] = []
        self._handle = 0
        self.opened = 0

    def step(self) -> None:
        if len(self._sockets) < CONNECTIONS:
            self._open()
        sock = self._dice.choice(self._sockets)
        self._handle += 1
        said = b"".join(mangled(self._dice, frame) for frame in frames(self._dice, self._handle))
        try:
            while said:
                size = self._dice.choice([1, 3, 64, 1 << 16])
                said = said[sock.send(said[:size]) :]
            with contextlib.suppress(BlockingIOError):
                while self._dice.random() < 0.7 and not sock.recv(1 << 16):
                    raise ConnectionResetError
        except OSError:  # it was thrown out
            self._close(sock)
            return
        if self._dice.random() < 0.1:
            if self._dice.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
            self._close(sock)

    def close(self) -> None:
        while self._sockets:
            self._close(self._sockets[0])

    def _open(self) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self._path))
        sock.setblocking(False)
        self._sockets.append(sock)
        self.opened += 1
        if self._dice.random() < 0.9:
            sock.send(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))

    def _close(self, sock: socket.socket) -> None:
        self._sockets.remove(sock)
        sock.close()


@pytest.mark.parametrize("seed", range(24))
def test_whatever_bytes_arrive_the_engine_and_a_bystander_go_on_and_nothing_is_left(wire: Wire, seed: int) -> None:
    dice = random.Random(seed)
    hostile = Hostile(wire.links.path, dice)
    for _ in range(STEPS):
        hostile.step()
        for _ in range(dice.randrange(4)):
            wire.engine.turn()
            wire.bystander.hear()
    hostile.close()
    wire.check_bystander()
    wire.turn_until(lambda: wire.engine.stats().front_ends_lost == hostile.opened)
    wire.turn_until(lambda: not wire.engine.ledger.in_flight and not len(wire.engine.registry))
    stats = wire.engine.stats()
    assert stats.submitted > 1, "some of what was said was understood"
    assert wire.reasons, "and some was not"
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.rows_free == stats.rows_total
    wire.bystander.say(submit(2))
    wire.turn_until(lambda: sum(isinstance(said, m.Accepted) for said in wire.bystander.heard) == 2)
