"""The figures of the service for whoever asks: once, or as often as they change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc

from runahead.runtime.wire.figures import EngineStats
from runahead.service.board import Board, Line
from runahead.service.call import begin_answer, current_call
from runahead.service.engine_client import EngineClient
from runahead.service.errors import Violation, exhausted, invalid_argument, shutting_down
from runahead.service.held import Resource
from runahead.service.limits import LIMITS
from runahead.service.stats import ServiceFigures, server_stats
from runahead.service.validation import check_known
from runahead.v1 import ServerStats, WatchStatsRequest, WatchStatsResponse

_DEFAULT_S: Final = 1.0  # between two messages to a watcher
_LEAST_S: Final = 0.05  # the engine gathers its figures no oftener
_MOST_S: Final = 3600.0
_LOOK_S: Final = 0.25  # from one look at figures that do not change to the next

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, eq=False)
class _Watcher:
    """A call of WatchStats. is_beginning: its first message is being written, with the call's headers: before these are
    out, no status can be sent."""

    task: asyncio.Task[Any]
    is_beginning: bool = False


class StatsFeed:
    """counters: this process's line of the board. version: of the server."""

    def __init__(self, engine: EngineClient, board: Board, counters: Line, version: str) -> None:
        self._engine = engine
        self._board = board
        self._counters = counters
        self._version = version
        self._watchers: set[_Watcher] = set()
        self._closed = False
        self._question: asyncio.Task[EngineStats] | None = None  # to the engine, on behalf of all watchers

    def close(self) -> None:
        """Ends every watcher, and takes no more: UNAVAILABLE, reason SHUTDOWN."""
        self._closed = True
        for watcher in self._watchers:
            if not watcher.is_beginning:
                watcher.task.cancel()

    async def stats(self) -> ServerStats:
        """All figures, none older than the question. Raises EngineLostError, also at once if the engine is silent."""
        return self._with_ours(await self._engine.stats())

    async def watch(self, request: WatchStatsRequest, context: _Context) -> None:
        """Writes the figures, and again whenever one has changed. Ends by an exception only: ServiceError, or
        EngineLostError, also if the engine falls silent."""
        least_s = _interval_s(request)
        with self._watching(context) as watcher:
            told = b""
            while True:
                stats = self._with_ours(await self._shared())
                now = _what_changes(stats)
                if now != told:
                    if not told:
                        watcher.is_beginning = True
                        await begin_answer(context, current_call())
                    await context.write(WatchStatsResponse(stats=stats))
                    watcher.is_beginning = False
                if self._closed:
                    raise shutting_down()
                await asyncio.sleep(least_s if now != told else min(least_s, _LOOK_S))
                told = now

    def _with_ours(self, engine: EngineStats) -> ServerStats:
        """The sums of all front ends beside it, and that it is this process that says so."""
        table, held = self._board.processes, self._board.held.in_all().tolist()
        figures = ServiceFigures(
            self._version,
            self._engine.server_id,
            table.connections,
            table.read(),
            self._board.refusals(),
            queued_tokens=held[Resource.QUEUED_TOKENS],
            tokenizing_bytes=held[Resource.TOKENIZING_BYTES],
            uploads=held[Resource.UPLOADS],
        )
        counters = replace(self._board.total(), answered_by=self._counters.answered_by)
        return server_stats(engine, counters, figures)

    async def _shared(self) -> EngineStats:
        """The engine is asked once for all watchers that ask meanwhile. Raises EngineLostError."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._engine.stats())
            self._question.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may be gone
        return await asyncio.shield(self._question)

    @contextmanager
    def _watching(self, context: _Context) -> Iterator[_Watcher]:
        """One of the watchers that there may be. Raises ServiceError (RESOURCE_EXHAUSTED or UNAVAILABLE)."""
        if self._closed:
            raise shutting_down()
        if len(self._watchers) >= LIMITS.stats_watchers:
            sentence = f"{LIMITS.stats_watchers} calls of WatchStats are open, which is this process's limit"
            raise exhausted("WATCHERS_LIMIT", sentence, LIMITS.retry_s)
        task = asyncio.current_task()
        assert task is not None
        watcher = _Watcher(task)
        self._watchers.add(watcher)
        self._counters.stats_watchers = len(self._watchers)
        try:
            yield watcher
        except asyncio.CancelledError:
            if not self._closed or context.cancelled():
                raise
            task.uncancel()
            raise shutting_down() from None
        finally:
            self._watchers.discard(watcher)
            self._counters.stats_watchers = len(self._watchers)


def _interval_s(request: WatchStatsRequest) -> float:
    """Raises ServiceError (INVALID_ARGUMENT)."""
    check_known(request)
    if not request.HasField("interval"):
        return _DEFAULT_S
    seconds = request.interval.seconds + request.interval.nanos * 1e-9
    if not _LEAST_S <= seconds <= _MOST_S:
        sentence = f"interval must be {_LEAST_S:g} to {_MOST_S:g} seconds, and is {seconds:g}"
        raise invalid_argument([Violation("interval", sentence)])
    return seconds


def _what_changes(stats: ServerStats) -> bytes:
    """The figures without those that change while nothing happens."""
    rest = ServerStats()
    rest.CopyFrom(stats)
    rest.ClearField("uptime_s")
    rest.ClearField("processes")
    rest.chain.ClearField("host_s")
    rest.chain.ClearField("waits")
    return rest.SerializeToString(deterministic=True)
