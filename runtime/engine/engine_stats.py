"""The engine's `Stats` and the facts that it logs at start, read from the objects that own them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from copy import copy
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Device
from runahead.runtime.engine.figures import Figures, Histogram, IntervalLog, Latencies, LoopTimes
from runahead.runtime.masks.masks import Masks
from runahead.runtime.scheduler.drafts import DraftPolicy, tokens_per_launch
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.watchdog import Watchdog
from runahead.runtime.wire.figures import EngineStats, EventStats, HistogramStats
from runahead.runtime.wire.messages import EngineInfo

# Figures with the same names in `EngineStats`: the scheduler's counters, `Figures`, `DeviceCounters`, pools.
COUNTED: Final = (
    "submitted", "admitted", "prompt_tokens", "generated_tokens", "void_rows", "held_rows", "prefill_chunks",
    "cached_tokens", "queried_tokens", "recomputed_tokens", "blocks_reserved", "blocks_adopted", "blocks_returned",
)  # fmt: skip
_OF_LAUNCHES: Final = (
    "held_back", "launches_by_kind", "launches_by_depth", "overlapped", "firsts_after_idle", "overlap_ratio",
    "barriers", "barrier_s",
)  # fmt: skip
_OF_DEVICE: Final = ("waits", "bytes_to_device", "graph_captures", "graph_replays", "fallbacks")
_STATES: Final = ("total", "free", "owned", "fenced", "cached")


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
    ledger, tally, holdings = scheduler.ledger, scheduler.tally, scheduler.holdings
    return EngineStats(
        uptime_s=times.uptime_s,
        preparing=len(announced),
        waiting=len(scheduler.waiting),
        running=len(holdings.requests()),
        paused=len(holdings.paused),
        finished=dict(tally.finished),
        **_counted(tally.counters),
        **_of_drafts(scheduler.drafts, tally.counters["generated_tokens"]),
        **_of("masks", masks.figures()._fields, masks.figures()),
        aborted=_aborted(tally.aborted, intake),
        events=_events(tally.events, figures),
        **_of("blocks", _STATES, scheduler.pool),
        **_of("snapshots", _STATES, holdings.snapshots),
        snapshots_kept=holdings.snapshots.kept_total,
        snapshots_found=holdings.snapshots.found_total,
        snapshots_skipped=holdings.snapshots.skipped_total,
        rows_total=scheduler.rows.max_rows,
        rows_free=scheduler.rows.free,
        rows_fenced=scheduler.rows.fenced,
        **_of("penalty_slots", ("total", "free", "fenced"), holdings.penalty_slots),
        run_ahead=run_ahead_asked,
        ledger_depth=ledger.uncommitted,
        ledger_depth_max=figures.depth_max,
        launches=ledger.launched,
        launches_retired=figures.retired,
        **_of("", _OF_LAUNCHES, figures),
        device_idle_s=figures.idle_ns / 1e9,
        device_busy_s=figures.busy_ns / 1e9,
        device_idle_inside_s=figures.idle_inside_ns / 1e9,
        rank_wait_s={rank: ns / 1e9 for rank, ns in enumerate(device.rings.rank_waited_ns.tolist())},
        host_s=times.host_s,
        **_of("", _OF_DEVICE, device.counters),
        deferred_releases=ledger.deferred_total,
        front_ends_lost=intake.get("front_ends_lost", 0),
        first_token=_histogram(latencies.first_token),
        inter_token=_histogram(latencies.inter_token),
        queue=_histogram(latencies.queue),
        end_to_end=_histogram(latencies.end_to_end),
    )


def _counted(counters: Mapping[str, int]) -> dict[str, Any]:
    return {name: counters[name] for name in COUNTED}


def _of(group: str, names: Sequence[str], owner: object) -> dict[str, Any]:
    """Return copies of these attributes by their names in `EngineStats`. group: begins the names."""
    return {f"{group}_{name}" if group else name: copy(getattr(owner, name)) for name in names}


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
