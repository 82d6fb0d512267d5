"""Events of the prefix cache for routers, of any protocol: from a copy of the cache's contents, in numbered batches.

The newest batches are kept: a reader continues after the last one it has read.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

import numpy as np
import structlog

from runahead.runtime.wire.kv_events import KvChange
from runahead.runtime.wire.messages import EngineInfo
from runahead.runtime.wire.prompts import empty_prefix
from runahead.service.contract.errors import SHUTDOWN_SENTENCE
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError

MOST_EVENTS: Final = 512  # in a batch
KIND: Final = "full_attention"  # routers' name of a cache that keeps every token of a prefix
MEDIUM: Final = "GPU"  # routers' name of device memory, also on a CPU
_ROOT: Final = empty_prefix("")

_PACE_S: Final = 0.02
_SILENT_S: Final = 0.5  # before the next question to a silent engine

_KEPT: Final = 1 << 16  # events
log = structlog.get_logger(__name__)
_LEAST_NUMBER: Final = 1 << 32  # a snapshot of many parts has numbers below the first batch's


class Stored(NamedTuple):
    """A block can be found. key, before: of the block and of its predecessor. tokens: its ids, int32 bytes."""

    key: bytes
    before: bytes
    tokens: bytes

    @property
    def parent(self) -> bytes | None:
        """The predecessor's key, None for a prompt's first block."""
        return None if self.before == _ROOT else self.before

    @property
    def ids(self) -> list[int]:
        """Return the block's token ids."""
        ids: list[int] = np.frombuffer(self.tokens, "<i4").tolist()
        return ids


class Removed(NamedTuple):
    """A block can't be found any more."""

    key: bytes


class Cleared(NamedTuple):
    """No block can be found."""


Event = Stored | Removed | Cleared


def batches(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Split events into batches of at most MOST_EVENTS, in order."""
    left = iter(events)
    while batch := list(islice(left, MOST_EVENTS)):
        yield batch


def runs(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Split events into groups that can share a message: stored blocks that form a chain, and consecutive removed
    blocks.
    """
    run: list[Event] = []
    for event in events:
        if run and not _goes_on(run[-1], event):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def sliding_window(info: EngineInfo) -> int | None:
    """Return the window in tokens if every attention layer has the same one, else None."""
    windows = {layer.window for layer in info.layers if layer.mixer == "attention"}
    return (windows.pop() or None) if len(windows) == 1 else None


def _goes_on(last: Event, event: Event) -> bool:
    if isinstance(event, Stored):
        return isinstance(last, Stored) and event.before == last.key
    return isinstance(event, Removed) and isinstance(last, Removed)


class KvMirror:
    """The blocks of the empty salt that a prompt can begin with.

    needs_snapshots: the model has recurrent states. A cached prefix then ends at a snapshot of the state, so a block
    counts if it or a later block of its chain has one.
    """

    def __init__(self, needs_snapshots: bool) -> None:
        self._needs_snapshots = needs_snapshots
        self._blocks: dict[bytes, Stored] = {}  # blocks that count, by key, in the order in which they began to
        self._there: dict[bytes, Stored] = {}  # all blocks of the engine's cache
        self._snapshots: set[bytes] = set()  # snapshots, by the key of the preceding block
        self._followed: defaultdict[bytes, int] = defaultdict(int)  # counting blocks directly after a counting block

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget all blocks."""
        for known in (self._blocks, self._there, self._snapshots, self._followed):
            known.clear()

    def apply(self, changes: Iterable[KvChange]) -> list[Event]:
        """Apply changes and return the router's events, parents before children. A repeated change counts once."""
        events: list[Event] = []
        for change in changes:
            if not change.is_snapshot:
                if change.is_stored:
                    self._there[change.key] = Stored(change.key, change.before, change.tokens)
                else:
                    self._there.pop(change.key, None)
            elif change.is_stored:
                self._snapshots.add(change.key)
            else:
                self._snapshots.discard(change.key)
            events += self._settle(change.key)
        return events

    def blocks(self) -> list[Stored]:
        """Return all blocks that count, parents before children."""
        found: dict[bytes, Stored] = {}
        for block in self._blocks.values():
            ahead = []
            at: Stored | None = block
            while at is not None and at.key not in found:
                ahead.append(at)
                at = self._blocks.get(at.before)
            found.update((one.key, one) for one in reversed(ahead))
        return list(found.values())

    def _settle(self, key: bytes) -> list[Event]:
        """Update whether this block and its predecessors count, and return the events."""
        stored, removed = list[Event](), list[Event]()
        while True:
            block = self._there.get(key)
            counts = block is not None and (
                not self._needs_snapshots or key in self._snapshots or self._followed.get(key, 0) > 0
            )
            if counts == (key in self._blocks):
                return stored[::-1] or removed
            if counts:
                assert block is not None
                self._blocks[key] = block
                stored.append(block)
            else:
                block = self._blocks.pop(key)
                removed.append(Removed(key))
            if not self._needs_snapshots:
                return stored or removed
            self._followed[block.before] += 1 if counts else -1
            if not self._followed[block.before]:
                del self._followed[block.before]
            key = block.before


class Sink(Protocol):
    """Receives events."""

    def begin(self, mirror: KvMirror) -> None:
        """Start. Called once, before `add`. mirror: has the cached blocks from now on."""

    def add(self, events: Sequence[Event]) -> None:
        """Take at least one change. The mirror already has it."""


class KvFeed:
    """Polls the engine; run it on the event loop of the engine's client. pace_s: between an answer and the next
    question.
    """

    def __init__(self, engine: SocketEngineClient, sink: Sink, pace_s: float = _PACE_S) -> None:
        self._mirror = KvMirror(needs_snapshots=engine.info.state_bytes > 0)
        self._engine = engine
        self._sink = sink
        self._pace_s = pace_s
        self._has_begun = False

    async def run(self) -> None:
        """Run until the engine is lost. Raises EngineLostError."""
        while True:
            try:
                reply = await self._engine.kv_events()
            except EngineLostError as error:
                if error.reason != "ENGINE_SILENT":
                    raise
                await asyncio.sleep(_SILENT_S)
                continue
            events: list[Event] = []
            if reply.cleared:
                self._mirror.clear()
                events.append(Cleared())
            events += self._mirror.apply(reply.changes)
            if self._has_begun:
                if events:
                    self._sink.add(events)
            elif reply.is_whole:
                self._has_begun = True
                self._sink.begin(self._mirror)
            await asyncio.sleep(self._pace_s)


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
