"""The service's figures on request, or whenever they change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final

import grpc

from runahead.runtime.wire.figures import EngineStats
from runahead.service.calls.call import current_call
from runahead.service.calls.stream_writer import StreamWriter
from runahead.service.contract.errors import Violation, exhausted, invalid_argument, shutting_down
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import check_known
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.shared_memory.board import Board, Line
from runahead.service.shared_memory.held import Resource
from runahead.service.stats.stats import server_stats
from runahead.v1 import HeldStats, ProcessStats, ServerStats, WatchStatsRequest, WatchStatsResponse

_DEFAULT_S: Final = 1.0  # between two messages to a watcher
_LEAST_S: Final = 0.05  # the engine does not gather figures more often
_MOST_S: Final = 3600.0
_CHECK_S: Final = 0.25  # between checks of unchanged figures

_Context = grpc.aio.ServicerContext[Any, Any]


class StatsFeed:
    """Answers Stats and WatchStats. counters: this process's line of the board. version: the server's. stalled_s: see
    `StreamWriter`.
    """

    def __init__(
        self, engine: SocketEngineClient, board: Board, counters: Line, version: str, stalled_s: float
    ) -> None:
        self._engine = engine
        self._board = board
        self._counters = counters
        self._version = version
        self._stalled_s = stalled_s
        self._watchers: dict[asyncio.Task[Any], str] = {}  # caller names by the tasks of their calls
        self._closed = False
        self._question: asyncio.Task[EngineStats] | None = None  # the engine's pending answer, shared by all watchers

    def close(self) -> None:
        """End every watcher and refuse new ones with UNAVAILABLE, reason SHUTDOWN."""
        self._closed = True
        for task in self._watchers:
            task.cancel()

    async def stats(self) -> ServerStats:
        """Return all figures, none older than the call. Raises EngineLostError, also at once if the engine is
        silent.
        """
        return self._with_ours(await self._engine.stats())

    async def watch(self, request: WatchStatsRequest, context: _Context) -> None:
        """Write the figures at first and whenever one changes. Ends by an exception only: ServiceError, EngineLostError
        (also for silence) or StalledReaderError.
        """
        least_s = _interval_s(request)
        async with StreamWriter(context, self._stalled_s) as writer:
            with self._watching(context):
                await self._tell(least_s, writer)

    async def _tell(self, least_s: float, writer: StreamWriter) -> None:
        told = b""
        while True:
            stats = self._with_ours(await self._shared())
            now = _what_changes(stats)
            if now != told:
                if not told:
                    await writer.begin(current_call().trace.headers)
                await writer.write(WatchStatsResponse(stats=stats))
            if self._closed:
                raise shutting_down()
            await asyncio.sleep(least_s if now != told else min(least_s, _CHECK_S))
            told = now

    def _with_ours(self, engine: EngineStats) -> ServerStats:
        """Add the sums over all front ends, and this process's index."""
        table, held = self._board.processes, self._board.held.in_all().tolist()
        return server_stats(
            engine,
            replace(self._board.total(), answered_by=self._counters.answered_by),
            version=self._version,
            server_id=self._engine.server_id,
            connections=table.connections,
            processes=[ProcessStats(**asdict(process)) for process in table.read()],
            refusals=self._board.refusals(),
            held=HeldStats(
                queued_tokens=held[Resource.QUEUED_TOKENS],
                tokenizing_bytes=held[Resource.TOKENIZING_BYTES],
                uploads=held[Resource.UPLOADS],
            ),
        )

    async def _shared(self) -> EngineStats:
        """Ask the engine once for all waiting watchers. Raises EngineLostError."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._engine.stats())
            # all watchers may be gone
            self._question.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._question)

    @contextmanager
    def _watching(self, context: _Context) -> Iterator[None]:
        """Count a watcher, also for its caller, who may have half of them if callers have names. Raises ServiceError
        (RESOURCE_EXHAUSTED or UNAVAILABLE).
        """
        if self._closed:
            raise shutting_down()
        if len(self._watchers) >= LIMITS.stats_watchers:
            sentence = f"{LIMITS.stats_watchers} calls of WatchStats are open, which is this process's limit"
            raise exhausted("WATCHERS_LIMIT", sentence, LIMITS.retry_s)
        caller, share = current_call().caller, LIMITS.stats_watchers // 2
        if caller and list(self._watchers.values()).count(caller) >= share:
            sentence = f"you have {share} calls of WatchStats open, which is a caller's limit in this process"
            raise exhausted("WATCHERS_LIMIT", sentence, LIMITS.retry_s, subject=f"caller:{caller}")
        task = asyncio.current_task()
        assert task is not None
        self._watchers[task] = caller
        self._counters.stats_watchers = len(self._watchers)
        try:
            yield
        except asyncio.CancelledError:
            if not self._closed or context.cancelled():
                raise
            task.uncancel()
            raise shutting_down() from None
        finally:
            del self._watchers[task]
            self._counters.stats_watchers = len(self._watchers)


def _interval_s(request: WatchStatsRequest) -> float:
    """Return the interval in seconds. Raises ServiceError (INVALID_ARGUMENT)."""
    check_known(request)
    if not request.HasField("interval"):
        return _DEFAULT_S
    whole, nanos = request.interval.seconds, request.interval.nanos
    if abs(nanos) >= 10**9 or whole * nanos < 0:
        sentence = f"interval is no duration: {nanos} nanos beside {whole} seconds are too many, or have another sign"
        raise invalid_argument([Violation("interval", sentence)])
    seconds = whole + nanos * 1e-9
    if not _LEAST_S <= seconds <= _MOST_S:
        sentence = f"interval must be {_LEAST_S:g} to {_MOST_S:g} seconds, and is {seconds:g}"
        raise invalid_argument([Violation("interval", sentence)])
    return seconds


def _what_changes(stats: ServerStats) -> bytes:
    """Serialize the figures without those that change while nothing happens."""
    rest = ServerStats()
    rest.CopyFrom(stats)
    rest.ClearField("uptime_s")
    rest.ClearField("processes")
    rest.chain.ClearField("host_s")
    rest.chain.ClearField("waits")
    return rest.SerializeToString(deterministic=True)
