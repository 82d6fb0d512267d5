"""What no library of gRPC does: connections that end in the middle, uploads without an end, streams that nobody reads.

Each runs in a thread with a separate connection.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from benchmarks.soak.world import World, completion, now_s
from tests.service.raw_http2 import ACK, DATA, END_STREAM, MAX_WINDOW, RST_STREAM, SETTINGS, RawClient

RawFault = Callable[[World], None]
UPLOAD_S, STALLED_S = 2.0, 2.0  # settings of the service
_RESETS: Final = 30
_CANCEL: Final = struct.pack(">I", 8)


class WrongEnd(OSError):
    """A call has ended with another status than it should."""


def _headers(world: World) -> dict[str, str]:
    return dict(world.metadata("rude"))


def _message(world: World) -> bytes:
    """A prompt of several chunks, none of which is cached."""
    request = completion(300, lines=60, salt=world.new_id())
    request.priority = 500  # before others: what is tried here comes after the queue
    return request.SerializeToString()


def _greeted(world: World, window: int = MAX_WINDOW) -> RawClient:
    client = RawClient(world.port, window=window)
    client.frames_until(SETTINGS)
    client.send(SETTINGS, flags=ACK)
    return client


def leaves(world: World) -> None:
    """The connection ends before the request is there, before it is accepted, in the prefill and in the decode."""
    with _greeted(world) as client:
        client.message(client.begin("Generate", _headers(world)), _message(world)[:50], ends=False, says=1000)
    world.happened("gone in the upload")
    for name, messages in (("before it is accepted", 0), ("in the prefill", 1), ("in the decode", 4)):
        with _greeted(world) as client:
            stream = client.begin("Generate", _headers(world))
            client.message(stream, _message(world), ends=True)
            try:
                client.messages_of(stream, messages)
                world.happened(f"gone {name}")
            except TimeoutError:  # it is in the queue, and is left there
                world.happened("gone while nothing came for long")


def never_uploads(world: World) -> None:
    """Headers without a message, a message without its end, and a call without a message."""
    with _greeted(world) as client:
        _ends(world, client, client.begin("Generate"), 16, "without a credential, in bytes")
    with _greeted(world) as client:
        _ends(world, client, client.begin("Generate", _headers(world)), 4, "headers without a message")
    with _greeted(world) as client:
        half = client.begin("Generate", _headers(world))
        client.message(half, _message(world)[:50], ends=False, says=1000)
        _ends(world, client, half, 4, "a message without its end")
    with _greeted(world) as client:
        empty = client.begin("Generate", _headers(world))
        client.send(DATA, flags=END_STREAM, stream=empty)
        _ends(world, client, empty, 3, "a call without a message")


def never_reads(world: World) -> None:
    """The windows of three streams stay closed until long after the service has given them up."""
    with ExitStack() as stack:
        clients = [stack.enter_context(_greeted(world, window=0)) for _ in range(3)]
        streams = [client.begin("Generate", _headers(world)) for client in clients]
        for client, stream in zip(clients, streams, strict=True):
            client.message(stream, _message(world), ends=True)
        time.sleep(STALLED_S + 1.0)
        for client, stream in zip(clients, streams, strict=True):
            client.grant(stream, 1 << 20)
            _ends(world, client, stream, 8, "nobody reads")


def resets(world: World) -> None:
    """Calls that are made and reset at once, one after the other."""
    with _greeted(world) as client:
        for _ in range(_RESETS):
            stream = client.begin("Generate", _headers(world))
            client.message(stream, _message(world), ends=True)
            client.send(RST_STREAM, _CANCEL, stream=stream)
    world.happened("made and reset", _RESETS)


def _ends(world: World, client: RawClient, stream: int, code: int, name: str) -> None:
    """A call ends with a status, by its number. It is looked for as HPACK has it where it is said for the first time on
    a connection or is in no table."""
    payload = client.status_of(stream).payload
    status = str(code).encode()
    if b"grpc-status" + bytes([len(status)]) + status in payload:
        world.happened(name)
    else:
        raise WrongEnd(f"{name}: ended with {payload[:200]!r}, and not with the status {code}")


RAW_FAULTS: Final[Sequence[tuple[RawFault, float]]] = (
    (leaves, 0.5), (never_uploads, 2.0), (never_reads, 3.0), (resets, 2.0),
)  # fmt: skip
RAW_WANTED: Final = (
    "gone in the upload", "gone before it is accepted", "gone in the prefill", "gone in the decode",
    "headers without a message", "a message without its end", "a call without a message",
    "without a credential, in bytes", "nobody reads", "made and reset",
)  # fmt: skip


async def keep_doing_raw(world: World, fault: RawFault, every_s: float) -> None:
    """Until the soak has ended. A connection that its front end took with it is none that failed."""
    draws = world.draws(fault.__name__)
    while await world.pause(draws.expovariate(1 / every_s)):
        began_s = now_s()
        try:
            await asyncio.to_thread(fault, world)
        except (EOFError, OSError) as error:  # a time-out is an OSError
            if any(ended_s >= began_s - 1.0 for _, ended_s in world.standstills_s):
                world.happened("connections that met a standstill")  # whose time-outs are these tests' own
            elif any(killed_s >= began_s - 1.0 for killed_s in world.killed_s):
                world.happened("calls that ended with their front end")
            else:
                world.wrong.append(f"{fault.__name__}: {type(error).__name__} {error}")
