"""Keeps the newest numbered batches of events: a reader continues after the last one it has read."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog

from runahead.service.contract.errors import SHUTDOWN_SENTENCE
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.kv_events.feed import Cleared, Event, KvFeed, KvMirror, batches

_KEPT: Final = 1 << 16  # events
log = structlog.get_logger(__name__)
_LEAST_NUMBER: Final = 1 << 32  # a snapshot of many parts has numbers below the first batch's


class Batch(NamedTuple):
    """A batch. number: consecutive. taken_s: wall clock. part, parts: position in a snapshot of `blocks` blocks; 0
    parts if it is no snapshot.
    """

    number: int
    taken_s: float
    events: Sequence[Event]
    part: int = 0
    parts: int = 0
    blocks: int = 0


class KvHistory:
    """A sink of a `KvFeed`.

    Numbers begin at random, so that another process's number, or one from before an engine's restart, is not taken for
    one of these. begin: the number before the first; None: random. kept: events.
    """

    def __init__(self, begin: int | None = None, kept: int = _KEPT) -> None:
        self._kept = kept
        self._batches: deque[Batch] = deque()
        self._events = 0  # in all kept batches
        self._number = _LEAST_NUMBER + secrets.randbelow(1 << 61) if begin is None else begin  # of the newest batch
        self._mirror: KvMirror | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything can be read."""
        return self._mirror is not None

    def begin(self, mirror: KvMirror) -> None:
        """See `Sink`."""
        self._mirror = mirror

    def add(self, events: Sequence[Event]) -> None:
        """See `Sink`."""
        for batch in batches(events):
            self._number += 1
            self._batches.append(Batch(self._number, time.time(), batch))
            self._events += len(batch)
        while self._events > self._kept:
            self._events -= len(self._batches.popleft().events)

    def behind(self, number: int) -> list[Batch]:
        """Return the batches after this number, or all blocks as a snapshot if those batches are not kept or never
        existed; the snapshot's last part has the newest batch's number. Call it after `has_begun`.
        """
        oldest = self._number - len(self._batches)  # of the batch before the oldest kept one
        if oldest <= number <= self._number:
            return [self._batches[at] for at in range(number - oldest, len(self._batches))]
        assert self._mirror is not None
        blocks = self._mirror.blocks()
        parts = [*batches([Cleared(), *blocks])]
        first, now = self._number - len(parts) + 1, time.time()
        return [Batch(first + at, now, part, at, len(parts), len(blocks)) for at, part in enumerate(parts)]


class KvReaders:
    """A history that begins with its first reader and lasts as long as the engine."""

    def __init__(self, engine: SocketEngineClient) -> None:
        self._engine = engine
        self._history = KvHistory()
        self._feeding: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._lost: EngineLostError | None = None

    def begin(self, mirror: KvMirror) -> None:
        """See `Sink`."""
        self._history.begin(mirror)
        self._tell()

    def add(self, events: Sequence[Event]) -> None:
        """See `Sink`."""
        self._history.add(events)
        self._tell()

    async def behind(self, number: int, most_s: float | None) -> list[Batch]:
        """Wait for the batches after a number, at most `most_s` seconds (None: without limit) and return them, or an
        empty list. Raises EngineLostError.
        """
        if self._feeding is None:
            self._feeding = asyncio.create_task(KvFeed(self._engine, self).run())
            self._feeding.add_done_callback(self._on_end)
        end = None if most_s is None else asyncio.get_running_loop().time() + most_s
        while True:
            if self._lost is not None:
                raise self._lost.again()
            if self._history.has_begun and (found := self._history.behind(number)):
                return found
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return []

    def _on_end(self, feeding: asyncio.Task[None]) -> None:
        """Handle the end of the feed: shutdown, a lost engine, or a bug, which is logged."""
        error = None if feeding.cancelled() else feeding.exception()
        if error is None:
            self._lost = EngineLostError("SHUTDOWN", SHUTDOWN_SENTENCE)
        elif isinstance(error, EngineLostError):
            self._lost = error
        else:
            log.error("kv_events_ended", why=type(error).__name__)
            self._lost = EngineLostError("PROTOCOL", "the events of the KV cache have ended by an error of this server")
        self._tell()

    def _tell(self) -> None:
        """Wake the waiting readers."""
        self._changed.set()
        self._changed = asyncio.Event()
