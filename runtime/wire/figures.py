"""The figures of an engine, as it tells its front ends of them in a `StatsReply`."""

from __future__ import annotations

from typing import Final

import msgspec

BARRIERS: Final = ("logging", "shutdown")  # reasons for which the chain is drained
FALLBACKS: Final = ("closing", "drafts", "mixed", "prompt_logprobs")  # reasons for which a launch was not one graph


class EventStats(msgspec.Struct, frozen=True):
    """How often a kind of lifecycle event happened, and whether the chain went on without a gap.

    held: the next launch was enqueued while its predecessor still ran. idle: there was no chain to hold, the next
    launch was the first after the loop had nothing to do.
    """

    count: int
    held: int
    idle: int


class HistogramStats(msgspec.Struct, frozen=True):
    """Times in the buckets of `runahead.runtime.wire.histogram.BOUNDS_S`. counts: one more than there are bounds.
    sum_s: seconds."""

    counts: list[int]
    sum_s: float


class EngineStats(msgspec.Struct, frozen=True):
    """Figures since the start, from retired launches only where they concern launches. Times are seconds."""

    uptime_s: float
    preparing: int  # announced, and not submitted yet
    waiting: int
    running: int
    paused: int  # of the running ones: left out of the last plan for want of blocks
    finished: dict[str, int]  # requests, by FinishReason name
    submitted: int
    admitted: int
    prompt_tokens: int
    generated_tokens: int
    void_rows: int
    held_rows: int  # times that a launch brought no token of a row, since its mask was late
    drafted: dict[int, int]  # drafts that launches have looked at, by their place in a run, from 1 on
    accepted: dict[int, int]  # of these, those that were right
    tokens_per_launch: float  # of a row, on average over launches and rows of which any came; 0 before the first
    masks_orders_waiting: int  # of the mask worker: not carried out
    masks_written: int
    masks_written_s: float
    masks_grammars_compiled: int
    masks_grammars_compiled_s: float
    masks_grammars_known: int  # requests whose grammar had been compiled before
    masks_restarts: int  # times that the mask worker was started again
    prefill_chunks: int
    cached_tokens: int  # of prompts, taken from the prefix cache
    queried_tokens: int  # of prompts, looked for in the prefix cache
    recomputed_tokens: int  # prefilled again after an eviction
    aborted: dict[str, int]  # ended from outside, by phase: PREPARING, WAITING, PREFILL, DECODE, PAUSED, LEAVING
    blocks_reserved: int  # allocated for a boundary that a launch would cross
    blocks_adopted: int  # of these, by rows that went on
    blocks_returned: int  # of these, by rows that had ended
    events: dict[str, EventStats]  # admitted, chunk, finished, aborted, paused, resumed, evicted, readmitted
    blocks_total: int
    blocks_free: int
    blocks_owned: int
    blocks_fenced: int
    blocks_cached: int
    snapshots_total: int  # of recurrent states, beside cached blocks
    snapshots_free: int
    snapshots_owned: int
    snapshots_fenced: int
    snapshots_cached: int
    snapshots_kept: int  # states that became findable
    snapshots_found: int  # rows that began with one
    snapshots_skipped: int  # boundaries that a row may reach and that got none
    rows_total: int
    rows_free: int
    rows_fenced: int
    penalty_slots_total: int
    penalty_slots_free: int
    penalty_slots_fenced: int
    run_ahead: int  # asked for, as the engine was configured; 0: serial
    ledger_depth: int  # launches now queued and not committed
    ledger_depth_max: int  # reached: the most that were uncommitted when a launch was enqueued, itself included
    held_back: int  # times only a bound on launches with prompts kept one from being queued
    launches: int
    launches_retired: int
    launches_by_kind: dict[str, int]  # decode, mixed, closing
    launches_by_depth: dict[int, int]  # uncommitted launches at the moment of enqueueing, this one included
    overlapped: int
    firsts_after_idle: int
    overlap_ratio: float  # overlapped / (retired launches - firsts after idle); 0 before the first
    device_idle_s: float  # between the F of a launch and the S of the next, firsts after idle left out
    device_busy_s: float  # from the start of each S to the end of its F
    device_idle_inside_s: float  # of the busy time, at most, the device had nothing to run
    rank_wait_s: dict[int, float]  # by rank, waiting for other ranks within launches; empty with one rank
    host_s: float  # the loop's own time, waits left out
    waits: int
    bytes_to_device: int
    graph_captures: int
    graph_replays: int
    fallbacks: dict[str, int]
    barriers: dict[str, int]
    barrier_s: dict[str, float]
    deferred_releases: int
    front_ends_lost: int
    first_token: HistogramStats  # from submission to the first token
    inter_token: HistogramStats  # from each token of a request to its next
    queue: HistogramStats  # from submission to admission
    end_to_end: HistogramStats  # from submission to the last token
