"""Follows the engine's prefix cache and passes changes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

import structlog

from runahead.runtime.wire.frames import ProtocolError
from runahead.runtime.wire.kv_events import kv_changes
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.kv_events.events import Cleared, Event
from runahead.service.kv_events.mirror import KvMirror

_PACE_S: Final = 0.02
_SILENT_S: Final = 0.5  # before the next question to a silent engine
_SENTENCE: Final = "the engine's events of the KV cache can't be read"

log = structlog.get_logger(__name__)


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
            try:
                events += self._mirror.apply(kv_changes(reply, self._engine.info.block_size))
            except ProtocolError as error:
                log.error("engine_protocol_error", error=str(error))
                raise EngineLostError("PROTOCOL", _SENTENCE) from error
            if self._has_begun:
                if events:
                    self._sink.add(events)
            elif reply.is_whole:
                self._has_begun = True
                self._sink.begin(self._mirror)
            await asyncio.sleep(self._pace_s)
