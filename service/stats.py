"""The engine's figures, and this front end's, as a `ServerStats` message."""

from __future__ import annotations

from dataclasses import dataclass

from runahead.runtime.wire.histogram import BOUNDS_S, quantile
from runahead.runtime.wire.messages import EngineStats, HistogramStats
from runahead.v1 import (
    BarrierStats,
    BlockStats,
    ChainStats,
    EventStats,
    FrontEndStats,
    GraphStats,
    Histogram,
    LifecycleStats,
    PenaltySlotStats,
    Quantiles,
    RequestStats,
    RowStats,
    ServerStats,
    TokenStats,
)


@dataclass(slots=True)
class FrontEndCounters:
    """What this front end saw. One event loop writes it."""

    open_streams: int = 0
    stop_strings: int = 0
    cancelled: int = 0
    slow_readers: int = 0
    refused: int = 0


def server_stats(engine: EngineStats, counters: FrontEndCounters) -> ServerStats:
    """All figures of `Stats`."""
    return ServerStats(
        uptime_s=engine.uptime_s,
        requests=RequestStats(
            waiting=engine.waiting,
            running=engine.running,
            paused=engine.paused,
            submitted=engine.submitted,
            admitted=engine.admitted,
            finished=engine.finished,
        ),
        tokens=TokenStats(
            prompt=engine.prompt_tokens,
            generated=engine.generated_tokens,
            void_rows=engine.void_rows,
            prefill_chunks=engine.prefill_chunks,
            cached=engine.cached_tokens,
            recomputed=engine.recomputed_tokens,
        ),
        blocks=BlockStats(
            total=engine.blocks_total,
            free=engine.blocks_free,
            owned=engine.blocks_owned,
            fenced=engine.blocks_fenced,
            cached=engine.blocks_cached,
            reserved=engine.blocks_reserved,
            adopted=engine.blocks_adopted,
            returned=engine.blocks_returned,
        ),
        rows=RowStats(total=engine.rows_total, free=engine.rows_free, fenced=engine.rows_fenced),
        penalty_slots=PenaltySlotStats(
            total=engine.penalty_slots_total, free=engine.penalty_slots_free, fenced=engine.penalty_slots_fenced
        ),
        chain=_chain(engine),
        graphs=GraphStats(captures=engine.graph_captures, replays=engine.graph_replays, fallbacks=engine.fallbacks),
        barriers={
            reason: BarrierStats(count=count, seconds=engine.barrier_s.get(reason, 0.0))
            for reason, count in engine.barriers.items()
        },
        lifecycle=LifecycleStats(
            deferred_releases=engine.deferred_releases,
            front_ends_lost=engine.front_ends_lost,
            events={
                kind: EventStats(count=event.count, held=event.held, idle=event.idle)
                for kind, event in engine.events.items()
            },
            aborted=engine.aborted,
        ),
        first_token_s=_quantiles(engine.first_token),
        inter_token_s=_quantiles(engine.inter_token),
        first_token_histogram=_histogram(engine.first_token),
        inter_token_histogram=_histogram(engine.inter_token),
        front_end=FrontEndStats(
            open_streams=counters.open_streams,
            stop_strings=counters.stop_strings,
            cancelled=counters.cancelled,
            slow_readers=counters.slow_readers,
            refused=counters.refused,
        ),
    )


def _chain(engine: EngineStats) -> ChainStats:
    return ChainStats(
        run_ahead=engine.run_ahead,
        ledger_depth=engine.ledger_depth,
        ledger_depth_max=engine.ledger_depth_max,
        held_back=engine.held_back,
        launches=engine.launches,
        launches_retired=engine.launches_retired,
        launches_by_kind=engine.launches_by_kind,
        launches_by_depth=engine.launches_by_depth,
        overlapped=engine.overlapped,
        firsts_after_idle=engine.firsts_after_idle,
        overlap_ratio=engine.overlap_ratio,
        device_idle_s=engine.device_idle_s,
        device_busy_s=engine.device_busy_s,
        device_idle_inside_s=engine.device_idle_inside_s,
        host_s=engine.host_s,
        waits=engine.waits,
        bytes_to_device=engine.bytes_to_device,
    )


def _quantiles(times: HistogramStats) -> Quantiles:
    """None where nothing was measured."""
    if not any(times.counts):
        return Quantiles()
    return Quantiles(p50=quantile(times.counts, 0.5), p90=quantile(times.counts, 0.9), p99=quantile(times.counts, 0.99))


def _histogram(times: HistogramStats) -> Histogram:
    return Histogram(bounds_s=BOUNDS_S, counts=times.counts, count=sum(times.counts), sum_s=times.sum_s)
