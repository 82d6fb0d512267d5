"""What the chain runs with, read from the parts that act on it and not from the settings: logged at start."""

from __future__ import annotations

from runahead.cuda_graphs.device import Device
from runahead.runtime.engine.interval_log import IntervalLog
from runahead.runtime.engine.watchdog import Watchdog
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire.messages import EngineInfo


def chain_facts(
    scheduler: Scheduler,
    device: Device,
    interval_log: IntervalLog,
    watchdog: Watchdog,
    info: EngineInfo,
    run_ahead_asked: int,
) -> dict[str, object]:
    """By name. run_ahead: 0 is serial. blocks: KV blocks, the null block left out. snapshots: of recurrent states, at
    every snapshot_tokens-th token of a row. graph_buckets: rows that graphs are captured for, mixed_buckets: query
    tokens of launches with prompt chunks that graphs are captured for, none where there are no graphs.
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
        "graph_buckets": list(device.buckets),
        "mixed_buckets": list(device.mixed_buckets),
    }
