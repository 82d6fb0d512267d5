"""What a service counts, as one flat table that two moments can be compared by."""

from __future__ import annotations

from collections import Counter

from runahead.v1 import ServerStats


def full_depth(stats: ServerStats) -> int:
    """How many launches are uncommitted when one more is enqueued as deep as the service was asked for, with it."""
    return max(1, stats.chain.run_ahead)


def counted(stats: ServerStats) -> Counter[str]:
    """Counters of everything that a workload can make happen."""
    events = {kind: event.count for kind, event in stats.lifecycle.events.items()}
    admitted = stats.lifecycle.events["admitted"] if "admitted" in events else None
    barriers = {reason: barrier.count for reason, barrier in stats.barriers.items()}
    return Counter(
        {
            "launches": stats.chain.launches,
            "launches at the full depth": stats.chain.launches_by_depth.get(full_depth(stats), 0),
            "overlapped launches": stats.chain.overlapped,
            "generated tokens": stats.tokens.generated,
            "void rows": stats.tokens.void_rows,
            "cached tokens": stats.tokens.cached,
            "recomputed tokens": stats.tokens.recomputed,
            "drafts kept": sum(stats.tokens.accepted.values()),
            "snapshots kept": stats.snapshots.kept,
            "rows that began with a snapshot": stats.snapshots.found,
            "reserved blocks": stats.blocks.reserved,
            "adopted blocks": stats.blocks.adopted,
            "returned blocks": stats.blocks.returned,
            "logging barriers": barriers.get("logging", 0),
            "aborted while decoding": dict(stats.lifecycle.aborted).get("DECODE", 0),
            "cancelled": stats.front_end.cancelled,
            "admitted to a running chain": admitted.count - admitted.idle if admitted else 0,
            "chunks": events.get("chunk", 0),
            **{kind: events.get(kind, 0) for kind in ("paused", "resumed", "evicted", "readmitted")},
        }
    )


def grown(before: ServerStats, after: ServerStats) -> Counter[str]:
    """What happened between two moments."""
    since = counted(after)
    since.subtract(counted(before))
    return since


def drafts_by_place(before: ServerStats, after: ServerStats) -> dict[str, dict[int, int]]:
    """Drafts that launches have looked at between two moments, and those that were right, by their place in the run."""
    return {
        name: {place: count - getattr(before.tokens, name).get(place, 0) for place, count in counts.items()}
        for name, counts in (("drafted", after.tokens.drafted), ("accepted", after.tokens.accepted))
    }


def check_depth(stats: ServerStats, depth: str) -> None:
    """The service was asked for this depth and reached it, no less and no more, once it has served something."""
    chain = stats.chain
    assert chain.run_ahead == (0 if depth == "serial" else int(depth)), "it was asked for another depth"
    assert max(chain.launches_by_depth) == chain.ledger_depth_max == full_depth(stats), dict(chain.launches_by_depth)
    assert sum(chain.launches_by_depth.values()) == chain.launches


def check_at_rest(stats: ServerStats, barrier_interval: int) -> None:
    """Everything was given back, and a logging barrier came before every so-many-th launch (0: none) and no other."""
    rows, blocks, slots, requests = stats.rows, stats.blocks, stats.penalty_slots, stats.requests
    assert rows.free == rows.total, "a row was not given back"
    assert blocks.free + blocks.cached == blocks.total, "a block was not given back"
    assert slots.free == slots.total, "a penalty slot was not given back"
    assert stats.snapshots.free + stats.snapshots.cached == stats.snapshots.total, "a snapshot was not given back"
    assert (requests.waiting, requests.running, requests.paused) == (0, 0, 0)
    assert blocks.adopted + blocks.returned == blocks.reserved, "a reserved block was neither adopted nor returned"
    barriers = stats.chain.launches // barrier_interval if barrier_interval else 0
    assert counted(stats)["logging barriers"] == barriers, "logging barriers and launches do not agree"
