"""The engine's `Stats` and the facts that it logs at start, read from the objects that own them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Device
from runahead.runtime.engine.figures import Figures, Latencies, LoopTimes
from runahead.runtime.engine.interval_log import IntervalLog
from runahead.runtime.engine.watchdog import Watchdog
from runahead.runtime.masks.masks import Masks
from runahead.runtime.memory.snapshot_pool import SnapshotPool
from runahead.runtime.scheduler.drafts import DraftPolicy, tokens_per_launch
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire.figures import EngineStats, EventStats, HistogramStats
from runahead.runtime.wire.histogram import Histogram
from runahead.runtime.wire.messages import EngineInfo


def engine_stats(
    scheduler: Scheduler,
    device: Device,
    figures: Figures,
    latencies: Latencies,
    run_ahead_asked: int,
    intake: Mapping[str, int],
    times: LoopTimes,
    announced: Sized,
    masks: Masks,
) -> EngineStats:
    """Return a snapshot of the engine's figures. Figures of launches cover retired ones. run_ahead_asked: the
    configured depth. announced: requests that front ends have announced. masks: the mask maker."""
    ledger, pool, rows = scheduler.ledger, scheduler.pool, scheduler.rows
    return EngineStats(
        uptime_s=times.uptime_s,
        preparing=len(announced),
        waiting=len(scheduler.waiting),
        running=len(scheduler.holdings.requests()),
        paused=len(scheduler.holdings.paused),
        finished=dict(scheduler.tally.finished),
        **_counted(scheduler.tally.counters),
        **_of_drafts(scheduler.drafts, scheduler.tally.counters["generated_tokens"]),
        **{f"masks_{name}": value for name, value in masks.figures()._asdict().items()},
        aborted=_aborted(scheduler.tally.aborted, intake),
        events=_events(scheduler.tally.events, figures),
        blocks_total=pool.total,
        blocks_free=pool.free,
        blocks_owned=pool.owned,
        blocks_fenced=pool.fenced,
        blocks_cached=pool.cached,
        **_of_snapshots(scheduler.holdings.snapshots),
        rows_total=rows.max_rows,
        rows_free=rows.free,
        rows_fenced=rows.fenced,
        penalty_slots_total=scheduler.holdings.penalty_slots.total,
        penalty_slots_free=scheduler.holdings.penalty_slots.free,
        penalty_slots_fenced=scheduler.holdings.penalty_slots.fenced,
        run_ahead=run_ahead_asked,
        ledger_depth=ledger.uncommitted,
        ledger_depth_max=figures.depth_max,
        held_back=figures.held_back,
        launches=ledger.launched,
        launches_retired=figures.retired,
        launches_by_kind=dict(figures.launches_by_kind),
        launches_by_depth=dict(figures.launches_by_depth),
        overlapped=figures.overlapped,
        firsts_after_idle=figures.firsts_after_idle,
        overlap_ratio=figures.overlap_ratio,
        device_idle_s=figures.idle_ns / 1e9,
        device_busy_s=figures.busy_ns / 1e9,
        device_idle_inside_s=figures.idle_inside_ns / 1e9,
        rank_wait_s={rank: ns / 1e9 for rank, ns in enumerate(device.rings.rank_waited_ns.tolist())},
        host_s=times.host_s,
        waits=device.counters.waits,
        bytes_to_device=device.counters.bytes_to_device,
        graph_captures=device.counters.graph_captures,
        graph_replays=device.counters.graph_replays,
        fallbacks=dict(device.counters.fallbacks),
        barriers=dict(figures.barriers),
        barrier_s=dict(figures.barrier_s),
        deferred_releases=ledger.deferred_total,
        front_ends_lost=intake.get("front_ends_lost", 0),
        first_token=_histogram(latencies.first_token),
        inter_token=_histogram(latencies.inter_token),
        queue=_histogram(latencies.queue),
        end_to_end=_histogram(latencies.end_to_end),
    )


def _counted(counters: Mapping[str, int]) -> dict[str, Any]:
    """Return the counters of requests and tokens."""
    return {
        "submitted": counters["submitted"],
        "admitted": counters["admitted"],
        "prompt_tokens": counters["prompt_tokens"],
        "generated_tokens": counters["generated_tokens"],
        "void_rows": counters["void_rows"],
        "held_rows": counters["held_rows"],
        "prefill_chunks": counters["prefill_chunks"],
        "cached_tokens": counters["cached_tokens"],
        "queried_tokens": counters["queried_tokens"],
        "recomputed_tokens": counters["recomputed_tokens"],
        "blocks_reserved": counters["blocks_reserved"],
        "blocks_adopted": counters["blocks_adopted"],
        "blocks_returned": counters["blocks_returned"],
    }


def _of_snapshots(snapshots: SnapshotPool) -> dict[str, Any]:
    return {
        "snapshots_total": snapshots.total,
        "snapshots_free": snapshots.free,
        "snapshots_owned": snapshots.owned,
        "snapshots_fenced": snapshots.fenced,
        "snapshots_cached": snapshots.cached,
        "snapshots_kept": snapshots.kept_total,
        "snapshots_found": snapshots.found_total,
        "snapshots_skipped": snapshots.skipped_total,
    }


def _of_drafts(drafts: DraftPolicy, generated: int) -> dict[str, Any]:
    return {
        "drafted": _by_position(drafts.drafted),
        "accepted": _by_position(drafts.accepted),
        "tokens_per_launch": tokens_per_launch(generated, int(drafts.accepted.sum())),
    }


def _by_position(counts: NDArray[np.int64]) -> dict[int, int]:
    """Return counts, [K], by draft position from 1 on."""
    return dict(enumerate(counts.tolist(), start=1))


def _aborted(by_phase: Mapping[str, int], intake: Mapping[str, int]) -> dict[str, int]:
    """Return aborted requests by phase. The intake counts those in preparation, which the scheduler never had."""
    preparing = intake.get("aborted_preparing", 0)
    return {**by_phase, **({"PREPARING": preparing} if preparing else {})}


def _histogram(histogram: Histogram) -> HistogramStats:
    return HistogramStats(histogram.counts.tolist(), histogram.sum_s)


def _events(since_the_last_launch: Mapping[str, int], figures: Figures) -> dict[str, EventStats]:
    """Return all events. Events that no launch has followed yet count as neither held nor idle."""
    stats = {kind: EventStats(event.count, event.held, event.idle) for kind, event in figures.events.items()}
    for kind, count in since_the_last_launch.items():
        counted = stats.get(kind, EventStats(0, 0, 0))
        stats[kind] = EventStats(counted.count + count, counted.held, counted.idle)
    return stats


def chain_facts(
    scheduler: Scheduler,
    device: Device,
    interval_log: IntervalLog,
    watchdog: Watchdog,
    info: EngineInfo,
    run_ahead_asked: int,
) -> dict[str, object]:
    """Return the chain's configuration by name.

    run_ahead: 0 is serial. blocks: KV blocks without the null block. snapshots: of recurrent states, at every
    snapshot_tokens-th token of a row. graph_buckets: rows of captured graphs. mixed_buckets: query tokens of captured
    graphs for launches with prompt chunks. Both are empty without graphs.
    """
    ledger, limits, pool = scheduler.ledger, scheduler.limits, scheduler.pool
    return {
        "run_ahead_asked": run_ahead_asked,
        "run_ahead": ledger.run_ahead,
        "run_ahead_tokens": ledger.run_ahead_tokens,
        "ring_slots": device.rings.layout.slots,
        "prefill_chunk": limits.prefill_chunk,
        "max_prefill_tokens": limits.max_prefill_tokens,
        "mixed_prefill_tokens": limits.mixed_prefill_tokens,
        "max_rows": scheduler.rows.max_rows,
        "context_length": limits.context_length,
        "blocks": pool.total,
        "block_size": pool.block_size,
        "prefix_cache": limits.finds_prefixes,
        "snapshots": limits.snapshots,
        "snapshot_tokens": limits.snapshot_tokens,
        "penalty_slots": scheduler.holdings.penalty_slots.total,
        "log_interval": interval_log.interval,
        "log_mode": interval_log.mode,
        "launch_timeout_s": watchdog.limit_s,
        "device": info.device,
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "graph_buckets": list(device.buckets),
        "mixed_buckets": list(device.mixed_buckets),
    }
