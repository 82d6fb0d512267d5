"""Publishes KV cache events over ZMQ like vLLM's engine, for llm-d and Dynamo. Needs the extra `kv-events`.

A message has three parts: the topic `kv@POD@MODEL`, the number as 8 big-endian bytes, and MessagePack of [time, [event,
...], rank]. A subscriber that missed some asks the replay port with an empty part and the first missing number, and
gets every later message, each after an empty part; the last answer has an empty payload.

Numbers begin at 0, and again at 0 with a full snapshot after many batches: replay from 0 always gives everything, and
the replay memory is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog
import zmq
import zmq.asyncio

from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.kv_events.feed import (
    KIND,
    MEDIUM,
    Cleared,
    Event,
    KvMirror,
    Removed,
    Stored,
    batches,
    runs,
    sliding_window,
)
from runahead.service.settings.settings import NO_PORT

_MOST_BATCHES: Final = 10_000  # before numbers restart
_MOST_BYTES: Final = 64 << 20  # of payloads, before numbers restart
_RANK: Final = 0
_END: Final = (-1).to_bytes(8, "big", signed=True)  # number of the last answer
_MOST_ASKED: Final = 1024  # of a message from a peer
_UNREAD: Final = 4096  # messages that a subscriber may leave unread
_UNREAD_ANSWERS: Final = 64  # the same for replay answers, which wait for room
_HEARTBEAT_MS: Final = 10_000  # between heartbeats of a peer; three missing ones end the connection
_CHECK_S: Final = 0.01  # between checks whether a replay peer has read
_STALLED_S: Final = 2.0  # after which a replay peer that does not read is dropped
_AT_ONCE: Final = 64  # answers in one turn of the event loop

log = structlog.get_logger(__name__)


def topic(pod: str, model: str) -> bytes:
    """Return the topic of every message."""
    return f"kv@{pod}@{model}".encode()


def payload(events: Sequence[Event], info: EngineInfo, taken_s: float) -> bytes:
    """Encode a batch in MessagePack. taken_s: wall clock, seconds."""
    return msgspec.msgpack.encode((taken_s, [_event(run, info) for run in runs(events)], _RANK))


def block_hash(key: bytes) -> int:
    """Return the first 8 bytes of a block's key as uint64, which every version of both readers accepts."""
    return int.from_bytes(key[:8], "big")


class KvPublisher:
    """A sink of a `KvFeed`. most_batches: before numbers restart.

    host: an address. port, replay_port: 0 for any; NO_PORT disables replay. Raises ConfigError if a port is not
    available.
    """

    def __init__(
        self,
        name: bytes,
        info: EngineInfo,
        host: str,
        port: int,
        replay_port: int,
        *,
        most_batches: int = _MOST_BATCHES,
    ) -> None:
        self._topic = name
        self._info = info
        self._most_batches = most_batches
        self._mirror: KvMirror | None = None
        self._sent: list[bytes] = []  # payloads, by number
        self._bytes = 0  # since numbers began
        self._batches = 0  # since numbers began, without the snapshot
        self._context = zmq.asyncio.Context()
        self._replay: Any = None
        self._replaying: asyncio.Task[None] | None = None
        try:
            # Never waits: unread messages are dropped, which the subscriber sees by the numbers.
            plain: Any = zmq.Socket  # which does not linger
            self._publish: Any = self._context.socket(zmq.PUB, socket_class=plain)
            self.port = self._bind(self._publish, host, port, _UNREAD)
            self.replay_port = NO_PORT
            if replay_port != NO_PORT:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_port = self._bind(self._replay, host, replay_port, _UNREAD_ANSWERS)
                self._replaying = asyncio.create_task(self._answer())
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def begin(self, mirror: KvMirror) -> None:
        """See `Sink`."""
        self._mirror = mirror
        self._begin_again()

    def add(self, events: Sequence[Event]) -> None:
        """See `Sink`."""
        for batch in batches(events):
            self._batches += 1
            self._send(batch)
        if self._batches >= self._most_batches or self._bytes >= _MOST_BYTES:
            self._begin_again()

    def close(self) -> None:
        """Stop publishing."""
        if self._replaying is not None:
            self._replaying.cancel()
        self._context.destroy(linger=0)

    def _begin_again(self) -> None:
        assert self._mirror is not None
        self._sent, self._bytes, self._batches = [], 0, 0
        for batch in batches([Cleared(), *self._mirror.blocks()]):
            self._send(batch)
        self._bytes = 0

    def _send(self, events: Sequence[Event]) -> None:
        body, number = payload(events, self._info, time.time()), len(self._sent)
        self._sent.append(body)
        self._bytes += len(body)
        self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), body))

    async def _answer(self) -> None:
        """Answer replay requests one after the other."""
        while True:
            parts = await self._replay.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8:
                log.warning("kv_replay_refused", parts=len(parts))
                continue
            try:
                await self._tell(parts[0], int.from_bytes(parts[2], "big"))
            except (TimeoutError, zmq.ZMQError) as error:  # the peer is gone or does not read
                log.info("kv_replay_given_up", why=str(error) or "it reads nothing")

    async def _tell(self, asker: bytes, first: int) -> None:
        """Send a peer all messages from a number. Raises TimeoutError or ZMQError."""
        number, sent = first, self._sent
        while number < len(sent) and sent is self._sent:  # otherwise numbers have restarted, and the peer asks again
            await self._say((asker, b"", self._topic, number.to_bytes(8, "big"), sent[number]))
            number += 1
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._say((asker, b"", b"", _END, b""))

    async def _say(self, parts: tuple[bytes, ...]) -> None:
        """Send one message. Raises TimeoutError or ZMQError."""
        async with asyncio.timeout(_STALLED_S):
            while True:
                try:
                    # Below the asyncio layer, which waits for room at any peer instead of this one.
                    zmq.Socket.send_multipart(self._replay, parts, flags=zmq.DONTWAIT)
                    return
                except zmq.Again:
                    await asyncio.sleep(_CHECK_S)

    @staticmethod
    def _bind(socket: Any, host: str, port: int, unread: int) -> int:
        """Bind a socket whose peers leave at most `unread` messages unread, and return its port. Raises ConfigError."""
        for option, value in (
            (zmq.MAXMSGSIZE, _MOST_ASKED), (zmq.SNDHWM, unread), (zmq.LINGER, 0), (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        address = f"[{host.strip('[]')}]" if ":" in host else host
        try:
            socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the events of the KV cache can't be published on {host} port {port}: {error}"
            ) from error
        endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def _event(run: Sequence[Event], info: EngineInfo) -> tuple[Any, ...]:
    """Encode an event in the order of vLLM's fields; LoRA and extra hash keys are unset."""
    first = run[0]
    if isinstance(first, Stored):
        blocks = [block for block in run if isinstance(block, Stored)]
        parent = None if first.parent is None else block_hash(first.parent)
        ids = [token for block in blocks for token in block.ids]
        hashes = [block_hash(block.key) for block in blocks]
        window = sliding_window(info)
        return ("BlockStored", hashes, parent, ids, info.block_size, None, MEDIUM, None, None, 0, KIND, window)
    if isinstance(first, Removed):
        return ("BlockRemoved", [block_hash(block.key) for block in run if isinstance(block, Removed)], MEDIUM, 0)
    return ("AllBlocksCleared",)
