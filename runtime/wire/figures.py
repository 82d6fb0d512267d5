"""An engine's figures in a `StatsReply`, and the times of its newest launches in a `TraceReply`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

# Ten bounds a decade, from 10 µs to 1,000 s: each 1.26 times the previous one, rounded to four digits.
BOUNDS_S: Final = tuple(float(f"{10 ** (step / 10 - 5):.3e}") for step in range(81))

BARRIERS: Final = ("logging", "shutdown")  # reasons to drain the chain
FALLBACKS: Final = ("closing", "drafts", "mixed", "prompt_logprobs")  # reasons for a launch that was not one graph

MAX_TRACED: Final = 256  # recorded launches


def quantile(counts: Sequence[int], fraction: float) -> float:
    """Return the time in seconds that this fraction of the times do not exceed, assuming a uniform distribution
    within buckets.

    counts: of a `HistogramStats`, not all zero. Times above every bound count as the highest bound.
    """
    wanted, below = fraction * sum(counts), 0
    for bucket, count in enumerate(counts[:-1]):
        if count and below + count >= wanted:
            low = BOUNDS_S[bucket - 1] if bucket else 0.0
            return low + (BOUNDS_S[bucket] - low) * (wanted - below) / count
        below += count
    return BOUNDS_S[-1]


class EventStats(msgspec.Struct, frozen=True):
    """Counts of a kind of lifecycle event, by whether the chain continued without a gap.

    held: the next launch was enqueued while its predecessor ran. idle: the next launch was the first after the loop was
    idle.
    """

    count: int
    held: int
    idle: int


class HistogramStats(msgspec.Struct, frozen=True):
    """Times in the buckets of `runahead.runtime.wire.figures.BOUNDS_S`. counts: one more than bounds. sum_s:
    seconds.
    """

    counts: list[int]
    sum_s: float


class EngineStats(msgspec.Struct, frozen=True):
    """Figures since the start; figures of launches cover retired ones. Times are seconds."""

    uptime_s: float
    preparing: int  # announced, not submitted yet
    waiting: int
    running: int
    paused: int  # running, but left out of the last plan for lack of blocks
    finished: dict[str, int]  # requests, by FinishReason name
    submitted: int
    admitted: int
    prompt_tokens: int
    generated_tokens: int
    void_rows: int
    held_rows: int  # times that a row got no token because its mask was late
    drafted: dict[int, int]  # verified drafts by position, from 1
    accepted: dict[int, int]  # accepted ones
    tokens_per_launch: float  # average of a row over launches that brought it any; 0 before the first
    masks_orders_waiting: int  # unhandled orders of the mask worker
    masks_written: int
    masks_written_s: float
    masks_grammars_compiled: int
    masks_grammars_compiled_s: float
    masks_grammars_known: int  # requests whose grammar was already compiled
    masks_restarts: int  # restarts of the mask worker
    prefill_chunks: int
    cached_tokens: int  # prompt tokens from the prefix cache
    queried_tokens: int  # prompt tokens looked up in the prefix cache
    recomputed_tokens: int  # prefilled again after an eviction
    aborted: dict[str, int]  # by phase: PREPARING, WAITING, PREFILL, DECODE, PAUSED, LEAVING
    blocks_reserved: int  # allocated for block boundaries
    blocks_adopted: int  # of these, kept by continuing rows
    blocks_returned: int  # of these, returned by ended rows
    events: dict[str, EventStats]  # admitted, chunk, finished, aborted, paused, resumed, evicted, readmitted
    blocks_total: int
    blocks_free: int
    blocks_owned: int
    blocks_fenced: int
    blocks_cached: int
    snapshots_total: int  # of recurrent states
    snapshots_free: int
    snapshots_owned: int
    snapshots_fenced: int
    snapshots_cached: int
    snapshots_kept: int  # states that became findable
    snapshots_found: int  # rows that began with one
    snapshots_skipped: int  # reachable boundaries without one
    rows_total: int
    rows_free: int
    rows_fenced: int
    penalty_slots_total: int
    penalty_slots_free: int
    penalty_slots_fenced: int
    run_ahead: int  # configured depth; 0: serial
    ledger_depth: int  # enqueued and uncommitted launches
    ledger_depth_max: int  # the most uncommitted launches after an enqueue
    held_back: int  # times that only a bound on launches with prompts kept one from the queue
    launches: int
    launches_retired: int
    launches_by_kind: dict[str, int]  # decode, mixed, closing
    launches_by_depth: dict[int, int]  # uncommitted launches after an enqueue
    overlapped: int
    firsts_after_idle: int
    overlap_ratio: float  # overlapped / (retired launches - firsts after idle); 0 before the first
    device_idle_s: float  # between a launch's F and the next S, without firsts after idle
    device_busy_s: float  # from the start of each S to the end of its F
    device_idle_inside_s: float  # upper bound of idle time within the busy time
    rank_wait_s: dict[int, float]  # by rank, waiting for other ranks within launches; empty with one rank
    host_s: float  # the loop's time without waits
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


class LaunchTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A launch's times. `_s`: seconds on the engine's clock; `_ns`: nanoseconds on the device's.

    kind: decode, mixed or closing. rows, prompt_tokens: of its F. overlapped, first: see `Launch`. plan_s, stage_s: the
    host began to plan, to stage. launch_s, enqueued_s: before and after the call of the device. commit_s: the host
    began to commit the tokens. publish_s, published_s: before and after it sent them. ended_s: the check that found F
    ended. idle_inside_ns: within the launch, between its pieces. other_ranks_ns: from rank 1 on, start and end on the
    clock of the rank's device.
    """

    number: int
    kind: str
    rows: int
    prompt_tokens: int
    overlapped: bool
    first: bool
    plan_s: float
    stage_s: float
    launch_s: float
    enqueued_s: float
    commit_s: float
    publish_s: float
    published_s: float
    ended_s: float
    start_ns: int
    end_ns: int
    idle_inside_ns: int
    other_ranks_ns: tuple[tuple[int, int], ...] = ()


class Trace(msgspec.Struct, frozen=True, array_like=True):
    """The trace. launches: retired ones, oldest first. waits: begin and end of the loop's waits for marks or arrivals,
    in seconds on the engine's clock, oldest first; at most as far back as the launches.
    """

    launches: tuple[LaunchTimes, ...]
    waits: tuple[tuple[float, float], ...]
