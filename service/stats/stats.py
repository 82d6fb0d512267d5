"""Makes `ServerStats` from the figures of the engine, the front ends and the service, on request or at each change.

A figure has the same name on both sides, or its group's beside it in the engine: `tokens.void_rows` is `void_rows`,
`blocks.free` is `blocks_free` and `tokens.cached` is `cached_tokens`. `_OTHER_NAMES` has the exceptions, and
`server_stats` computes derived figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final

import grpc
import msgspec

from runahead.runtime.wire.figures import BOUNDS_S, EngineStats, HistogramStats, quantile
from runahead.service.calls.call import StreamWriter, current_call
from runahead.service.contract.errors import Violation, exhausted, invalid_argument, shutting_down
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import check_known
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.shared_memory.board import Board, FrontEndCounters, Line
from runahead.service.shared_memory.call_tables import Resource
from runahead.v1 import (
    BarrierStats,
    FrontEndStats,
    HeldStats,
    Histogram,
    ProcessStats,
    Quantiles,
    ServerStats,
    WatchStatsRequest,
    WatchStatsResponse,
)

_OTHER_NAMES: Final = {"graphs.captures": "graph_captures", "graphs.replays": "graph_replays"}
_GROUPS: Final = (
    "requests",
    "tokens",
    "blocks",
    "snapshots",
    "rows",
    "penalty_slots",
    "chain",
    "graphs",
    "lifecycle",
    "masks",
)
_CONTRACT: Final[Any] = ServerStats.DESCRIPTOR  # its class depends on protobuf's implementation

_DEFAULT_S: Final = 1.0  # between two messages to a watcher
_LEAST_S: Final = 0.05  # the engine does not gather figures more often
_MOST_S: Final = 3600.0
_CHECK_S: Final = 0.25  # between checks of unchanged figures

_Context = grpc.aio.ServicerContext[Any, Any]


def _engine_name(group: str, figure: str) -> str:
    """Return the engine's name of a contract's figure."""
    if other := _OTHER_NAMES.get(f"{group}.{figure}"):
        return other
    names = {figure, f"{group}_{figure}", f"{figure}_{group}"} & set(EngineStats.__struct_fields__)
    assert len(names) == 1, f"{group}.{figure} of the contract is one field of EngineStats, and not {sorted(names)}"
    return names.pop()


_NAMES: Final[dict[str, dict[str, str]]] = {
    group: {
        figure.name: _engine_name(group, figure.name) for figure in _CONTRACT.fields_by_name[group].message_type.fields
    }
    for group in _GROUPS
}


def server_stats(engine: EngineStats, counters: FrontEndCounters, **service: Any) -> ServerStats:
    """Make `ServerStats`. service: fields counted by neither the engine nor a front end."""
    stats = ServerStats(
        uptime_s=engine.uptime_s,
        barriers={
            reason: BarrierStats(count=count, seconds=engine.barrier_s.get(reason, 0.0))
            for reason, count in engine.barriers.items()
        },
        first_token_s=_quantiles(engine.first_token),
        inter_token_s=_quantiles(engine.inter_token),
        first_token_histogram=_histogram(engine.first_token),
        inter_token_histogram=_histogram(engine.inter_token),
        queue_histogram=_histogram(engine.queue),
        end_to_end_histogram=_histogram(engine.end_to_end),
        front_end=FrontEndStats(**asdict(counters)),
        **service,
    )
    for group, names in _NAMES.items():
        message = getattr(stats, group)
        message.SetInParent()
        for figure, name in names.items():
            _set(message, figure, getattr(engine, name))
    return stats


def _set(message: Any, figure: str, value: object) -> None:
    """Set a figure. value: a number, or numbers or structs by key."""
    if not isinstance(value, Mapping):
        setattr(message, figure, value)
        return
    entries = getattr(message, figure)
    for key, inner in value.items():
        if not isinstance(inner, msgspec.Struct):
            entries[key] = inner
            continue
        entries[key].SetInParent()
        for name, number in msgspec.structs.asdict(inner).items():
            setattr(entries[key], name, number)


def _quantiles(times: HistogramStats) -> Quantiles:
    """Return quantiles, None without a measurement."""
    if not any(times.counts):
        return Quantiles()
    return Quantiles(p50=quantile(times.counts, 0.5), p90=quantile(times.counts, 0.9), p99=quantile(times.counts, 0.99))


def _histogram(times: HistogramStats) -> Histogram:
    return Histogram(bounds_s=BOUNDS_S, counts=times.counts, count=sum(times.counts), sum_s=times.sum_s)


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
        caller, most = current_call().caller, LIMITS.stats_watchers // 2
        if caller and list(self._watchers.values()).count(caller) >= most:
            sentence = f"you have {most} calls of WatchStats open, which is a caller's limit in this process"
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
    """Serialize the figures that change only when something happens."""
    rest = ServerStats()
    rest.CopyFrom(stats)
    rest.ClearField("uptime_s")
    rest.ClearField("processes")
    rest.chain.ClearField("host_s")
    rest.chain.ClearField("waits")
    return rest.SerializeToString(deterministic=True)
