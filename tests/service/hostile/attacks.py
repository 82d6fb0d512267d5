"""What a hostile client does to a port, a round at a time: each is HTTP/2 that no gRPC client sends.

`python -m tests.service.hostile.attacks NAME PORT CONNECTIONS` goes on with one until it is ended.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from runahead.v1 import AbortRequest, GenerateRequest
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
_INTERNAL_ERROR: Final = struct.pack(">I", 2)
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
    too_long = {client.begin("Stats", {"x-long": "v" * 20_000}) for _ in range(20)}
    said = b""
    while too_long:
        frame = client.frames_until(HEADERS)[-1]
        too_long -= {frame.stream}
        said += frame.payload
    assert b"received metadata size exceeds" in said


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


def abort_storm(client: RawClient) -> None:
    """Completions that are aborted by their ids as they come, some before that."""
    for number in range(400):
        name, id_first = f"storm-{number}", number % 2
        request = GenerateRequest(text="def f():\n", request_id=name).SerializeToString()
        calls = [("Generate", request), ("Abort", AbortRequest(request_ids=[name]).SerializeToString())]
        for method, data in reversed(calls) if id_first else calls:
            client.message(client.begin(method), data, ends=True)


def settings_flood(client: RawClient) -> None:
    """Settings that change all the time, each to be acknowledged."""
    client.send(SETTINGS, struct.pack(">HI", 4, 1000), times=20_000)


def ping_flood(client: RawClient) -> None:
    """Pings, each to be answered."""
    client.send(PING, b"12345678", times=10_000)


def empty_data(client: RawClient) -> None:
    """A request that is sent in pieces of no bytes."""
    stream = client.begin("Generate")
    client.send(DATA, b"", stream=stream, times=50_000)


def started(method: str) -> str:
    return f'grpc_server_started_total{{grpc_method="{method}"}}'


def handled(method: str, code: str) -> str:
    return f'grpc_server_handled_total{{grpc_code="{code}",grpc_method="{method}"}}'


def refused(reason: str) -> str:
    return f'runahead_refusals_total{{reason="{reason}"}}'


@dataclass(frozen=True, slots=True)
class Attack:
    """make: on one connection, of as many at once. last_word: of the server, which closes the connections rather than
    take it all; empty: it takes all. window: of each call. does: by how much it raises figures of the service, at
    least, while what it has opened is open."""

    make: Callable[[RawClient], None]
    last_word: bytes = b""
    connections: int = 1
    window: int = 65_535
    does: Mapping[str, int] = field(default_factory=dict)

    def round(self, port: int, hold: Callable[[], None]) -> None:
        """Makes it, and keeps what it has opened for as long as `hold` lasts. Returns when the server has taken all of
        it and answers, or has closed the connections, whichever is right. Raises EOFError, TimeoutError or
        AssertionError if it does otherwise."""
        with ExitStack() as opened:
            clients = [
                opened.enter_context(RawClient(port, window=self.window, source=ATTACKER))
                for _ in range(self.connections)
            ]
            for client in clients:
                client.frames_until(SETTINGS)
                client.send(SETTINGS, flags=ACK)
                with contextlib.suppress(OSError) if self.last_word else contextlib.nullcontext():
                    self.make(client)
            for client in clients:
                if self.last_word:
                    assert self.last_word in client.wait_closed()
                else:
                    client.wait_heard()
            hold()


ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType(
    {
        "rapid_reset": Attack(
            rapid_reset, does={handled("Generate", "Canceled"): 10}
        ),  # as many as came to be looked at
        "abort_storm": Attack(abort_storm, does={started("Generate"): 400, started("Abort"): 400}),
        "header_flood": Attack(header_flood, does={started("Stats"): 200}),
        "continuation_flood": Attack(continuation_flood),
        "empty_continuations": Attack(empty_continuations, last_word=_INTERNAL_ERROR),
        "zero_windows": Attack(
            zero_windows, window=0, does={started("Generate"): 900, "runahead_slow_readers_total": 256}
        ),
        "calls_without_a_message": Attack(
            calls_without_a_message,
            connections=8,
            does={started("Generate"): 4_000, refused("UPLOAD_TIMEOUT"): 256, refused("CALLER_UPLOADS_LIMIT"): 1},
        ),
        "unfinished_uploads": Attack(
            unfinished_uploads,
            connections=8,
            does={started("Generate"): 480, refused("UPLOAD_TIMEOUT"): 256, refused("CALLER_UPLOADS_LIMIT"): 1},
        ),
        "settings_flood": Attack(settings_flood),
        "ping_flood": Attack(ping_flood, last_word=b"too_many_pings"),
        "empty_data": Attack(empty_data, last_word=b"Too many zero length data frames"),
    }
)


def main(name: str, port: int, connections: int) -> None:
    """Goes on until it is ended."""
    attack = replace(ATTACKS[name], connections=connections)
    while True:
        with contextlib.suppress(
            OSError, EOFError, AssertionError
        ):  # thrown out, by a proxy perhaps where the service does not
            attack.round(port, lambda: None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
