"""Everything that `Stats` shows, gathered in one place."""

from __future__ import annotations

from collections.abc import Mapping

from cuda_graphs.device import Device
from runtime.figures import Figures, quantiles
from runtime.messages import EngineStats
from runtime.scheduler import Scheduler


def engine_stats(
    scheduler: Scheduler, device: Device, figures: Figures, intake: Mapping[str, int], uptime_s: float
) -> EngineStats:
    """A snapshot. Figures of launches are those of retired ones."""
    ledger, pool, rows, counters = scheduler.ledger, scheduler.pool, scheduler.rows, scheduler.counters
    return EngineStats(
        uptime_s=uptime_s,
        waiting=len(scheduler.waiting),
        running=scheduler.running,
        finished=dict(scheduler.finished),
        submitted=counters["submitted"],
        admitted=counters["admitted"],
        prompt_tokens=counters["prompt_tokens"],
        generated_tokens=counters["generated_tokens"],
        void_rows=counters["void_rows"],
        prefill_chunks=counters["prefill_chunks"],
        blocks_total=pool.total,
        blocks_free=pool.free,
        blocks_owned=pool.owned,
        blocks_fenced=pool.fenced,
        blocks_cached=0,
        rows_total=rows.max_rows,
        rows_free=rows.free,
        rows_fenced=rows.fenced,
        run_ahead=ledger.run_ahead,
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
        host_s=figures.host_s,
        waits=device.counters.waits,
        bytes_to_device=device.counters.bytes_to_device,
        graph_captures=device.counters.graph_captures,
        graph_replays=device.counters.graph_replays,
        fallbacks=dict(device.counters.fallbacks),
        barriers=dict(figures.barriers),
        barrier_s=dict(figures.barrier_s),
        deferred_releases=ledger.deferred_total,
        front_ends_lost=intake.get("front_ends_lost", 0),
        first_token_s=quantiles(figures.first_token_s),
        inter_token_s=quantiles(figures.inter_token_s),
    )
