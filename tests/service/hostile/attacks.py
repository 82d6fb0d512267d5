"""What a hostile client does to a port, a round at a time: each is HTTP/2 that no gRPC client sends.

`python -m tests.service.hostile.attacks NAME PORT` goes on with one until it is ended.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from runahead.v1 import GenerateRequest
from tests.service.raw_http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    RawClient,
)

ATTACKER: Final = "127.0.0.2"  # not the bystander's, so that a limit of one caller tells them apart
_CANCEL: Final = struct.pack(">I", 8)
_REQUEST: Final = GenerateRequest(text="def f():\n").SerializeToString()


def rapid_reset(client: RawClient) -> None:
    """Calls that are cancelled in the packet that makes them."""
    for _ in range(2_000):
        stream = client.begin("Generate")
        client.message(stream, _REQUEST, ends=True)
        client.send(RST_STREAM, _CANCEL, stream=stream)


def header_flood(client: RawClient) -> None:
    """Calls with as many headers as one may have, and with more."""
    small = {f"x-{number}": "v" for number in range(400)}
    for _ in range(200):
        client.begin("Stats", small)
    for _ in range(20):
        client.begin("Stats", {"x-long": "v" * 16_000})


def continuation_flood(client: RawClient) -> None:
    """Headers that do not end for 17 MB."""
    client.send(HEADERS, b"\x00\x01a\x01b", stream=1)
    client.send(CONTINUATION, (b"\x00\x01a\x7f\x80\x10" + b"v" * 2_175) * 4, stream=1, times=2_000)
    client.send(CONTINUATION, flags=END_HEADERS, stream=1)


def empty_continuations(client: RawClient) -> None:
    """Headers that do not end for 50,000 frames of no bytes."""
    client.send(HEADERS, b"\x00\x01a\x01b", stream=1)
    client.send(CONTINUATION, b"", stream=1, times=50_000)
    client.send(CONTINUATION, flags=END_HEADERS, stream=1)


def zero_windows(client: RawClient) -> None:
    """Completions of which nothing can be sent."""
    for _ in range(900):
        client.message(client.begin("Generate"), _REQUEST, ends=True)


def calls_without_a_message(client: RawClient) -> None:
    """Headers, and nothing behind them, from several connections."""
    for _ in range(500):
        client.begin("Generate")


def unfinished_uploads(client: RawClient) -> None:
    """Requests of 3 MiB of which the last bytes never come."""
    for _ in range(60):
        stream = client.begin("Generate")
        client.message(stream, b"", ends=False, says=3 << 20)
        client.send(DATA, b"x" * 16_000, stream=stream, times=4)


def settings_flood(client: RawClient) -> None:
    """Settings that change all the time, each to be acknowledged."""
    client.send(SETTINGS, struct.pack(">HI", 4, 1000), times=20_000)


def ping_flood(client: RawClient) -> None:
    """Pings, each to be answered."""
    client.send(PING, b"12345678", times=50_000)


def empty_data(client: RawClient) -> None:
    """A request that is sent in pieces of no bytes."""
    stream = client.begin("Generate")
    client.send(DATA, b"", stream=stream, times=50_000)


@dataclass(frozen=True, slots=True)
class Attack:
    """make: on one connection, of as many at once. is_thrown_out: the server closes them, rather than take it all.
    window: of each call."""

    make: Callable[[RawClient], None]
    is_thrown_out: bool = False
    connections: int = 1
    window: int = 65_535

    def round(self, port: int, hold: Callable[[], None]) -> None:
        """Makes it, and keeps what it has opened for as long as `hold` lasts. Returns when the server has taken all of
        it and answers, or has closed the connections, whichever is right. Raises EOFError or TimeoutError if it does
        otherwise."""
        with ExitStack() as opened:
            clients = [
                opened.enter_context(RawClient(port, window=self.window, source=ATTACKER))
                for _ in range(self.connections)
            ]
            for client in clients:
                client.frames_until(SETTINGS)
                client.send(SETTINGS, flags=ACK)
                with contextlib.suppress(OSError) if self.is_thrown_out else contextlib.nullcontext():
                    self.make(client)
            for client in clients:
                client.wait_closed() if self.is_thrown_out else client.wait_heard()
            hold()


ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType(
    {
        "rapid_reset": Attack(rapid_reset),
        "header_flood": Attack(header_flood),
        "continuation_flood": Attack(continuation_flood),
        "empty_continuations": Attack(empty_continuations, is_thrown_out=True),
        "zero_windows": Attack(zero_windows, window=0),
        "calls_without_a_message": Attack(calls_without_a_message, connections=8),
        "unfinished_uploads": Attack(unfinished_uploads, connections=8),
        "settings_flood": Attack(settings_flood),
        "ping_flood": Attack(ping_flood, is_thrown_out=True),
        "empty_data": Attack(empty_data, is_thrown_out=True),
    }
)


def main(name: str, port: int) -> None:
    """Goes on until it is ended."""
    while True:
        with contextlib.suppress(OSError, EOFError):  # thrown out, by a proxy perhaps where the service does not
            ATTACKS[name].round(port, lambda: None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
