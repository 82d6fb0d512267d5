"""Formats `Stats` as text."""

from __future__ import annotations

from collections.abc import Mapping

from runahead.v1 import stats_pb2


def stats_lines(stats: stats_pb2.ServerStats) -> list[str]:
    """Return one line for each group of figures, its name first."""
    requests, tokens, chain, rows, blocks = stats.requests, stats.tokens, stats.chain, stats.rows, stats.blocks
    slots, lifecycle = stats.penalty_slots, stats.lifecycle
    ratio = f"{chain.overlap_ratio:.1%} of launches enqueued while the one before ran" if chain.overlapped else "none"
    groups = {
        "requests": f"{requests.submitted} submitted, {requests.admitted} admitted, {requests.running} running "
        f"({requests.paused} paused), {requests.waiting} waiting; ended: {_counts(requests.finished)}",
        "tokens": f"{tokens.generated} generated, {tokens.prompt} of prompts in {tokens.prefill_chunks} chunks, "
        f"{tokens.cached} from the prefix cache, {tokens.recomputed} recomputed, "
        f"{tokens.void_rows} rows void past an end, {tokens.held_rows} held for want of a mask",
        "drafts": _drafts(tokens),
        "masks": _masks(stats.masks),
        "launches": f"{chain.launches} enqueued ({_counts(chain.launches_by_kind)}), {chain.launches_retired} retired",
        "overlap": ratio,
        "depth": f"asked {chain.run_ahead or 'serial'}, reached {chain.ledger_depth_max}, now {chain.ledger_depth}; "
        f"launches by depth: {_counts(chain.launches_by_depth)}",
        "device": f"busy {chain.device_busy_s:.3f} s, of that idle inside launches at most "
        f"{chain.device_idle_inside_s:.3f} s, idle between launches {chain.device_idle_s:.3f} s, "
        f"{_each(chain.bytes_to_device, chain.launches)} bytes a launch copied to it",
        "host": f"{chain.host_s:.3f} s of the engine's loop, {chain.waits} waits",
        "graphs": f"{stats.graphs.captures} captured, {stats.graphs.replays} replayed; "
        f"launches without one: {_counts(stats.graphs.fallbacks)}",
        "barriers": ", ".join(
            f"{reason} {barrier.count} ({barrier.seconds:.3f} s)" for reason, barrier in sorted(stats.barriers.items())
        )
        or "none",
        "blocks": f"{blocks.free} of {blocks.total} free, {blocks.owned} owned, {blocks.fenced} fenced, "
        f"{blocks.cached} cached; at boundaries {blocks.reserved} reserved, {blocks.adopted} adopted, "
        f"{blocks.returned} returned",
        "snapshots": _snapshots(stats.snapshots),
        "slots": f"{rows.free} of {rows.total} row slots free, {rows.fenced} fenced; "
        f"{slots.free} of {slots.total} penalty slots free, {slots.fenced} fenced",
        "events": ", ".join(_event(kind, event) for kind, event in sorted(lifecycle.events.items())) or "none",
        "aborted": _counts(lifecycle.aborted),
        "lifecycle": f"{lifecycle.deferred_releases} releases deferred behind a launch in flight, "
        f"{stats.front_end.stop_strings} stop strings found, {stats.front_end.cancelled} cancelled, "
        f"{stats.front_end.refused} refused, {stats.front_end.slow_readers} slow readers, "
        f"{lifecycle.front_ends_lost} front ends lost",
        "latency": f"first token {_quantiles(stats.first_token_s)}; token to token {_quantiles(stats.inter_token_s)}",
        "calls": f"{stats.front_end.open_streams} completions open, {stats.connections} connections, "
        f"{stats.front_end.unread_bytes} bytes unread, {stats.held.queued_tokens} tokens queued, "
        f"{stats.front_end.waiting_texts} texts for the tokenizer, {stats.held.uploads} uploads; "
        f"{stats.front_end.structures_compiled} structures compiled, {stats.front_end.structure_hits} known, "
        f"{stats.front_end.waiting_structures} waiting; "
        f"refused: {_counts(stats.refusals)}",
    }
    if chain.rank_wait_s:
        waits = ", ".join(f"rank {rank} {seconds:.3f} s" for rank, seconds in sorted(chain.rank_wait_s.items()))
        groups["ranks"] = f"waited for others within launches: {waits}"
    if stats.processes:
        groups["memory"] = ", ".join(
            f"{process.name} {process.resident_bytes / 2**20:.0f} MiB, {process.descriptors} descriptors"
            + (f", {process.log_lines_dropped} lines not logged" if process.log_lines_dropped else "")
            for process in stats.processes
        )
    if stats.version:
        groups["server"] = f"{stats.version}, {stats.server_id}, up for {stats.uptime_s:.0f} s"
    return [f"{name:<10}{text}" for name, text in groups.items()]


def rate_line(before: stats_pb2.ServerStats, now: stats_pb2.ServerStats) -> str:
    """Return rates a second between two moments."""
    seconds = max(now.uptime_s - before.uptime_s, 1e-3)
    generated = (now.tokens.generated - before.tokens.generated) / seconds
    prompts = (now.tokens.prompt - before.tokens.prompt) / seconds
    ended = (sum(now.requests.finished.values()) - sum(before.requests.finished.values())) / seconds
    return (
        f"{'pace':<10}over {seconds:.1f} s: {generated:.0f} tokens/s generated, {prompts:.0f} of prompts, "
        f"{ended:.1f} requests/s ended"
    )


def _drafts(tokens: stats_pb2.TokenStats) -> str:
    """Format draft acceptance by position."""
    drafted, accepted = tokens.drafted, tokens.accepted
    if not any(drafted.values()):
        return "none"
    right, looked_at = sum(accepted.values()), sum(drafted.values())
    positions = ", ".join(
        f"{accepted.get(position, 0)} of {count}" for position, count in sorted(drafted.items()) if count
    )
    each = f"{tokens.per_launch:.2f} tokens of a row with each launch"
    return f"{right} of {looked_at} were right, {each}; by their place in a run: {positions}"


def _snapshots(snapshots: stats_pb2.SnapshotStats) -> str:
    """Format snapshots of recurrent states."""
    if not snapshots.total:
        return "none"
    return (
        f"{snapshots.free} of {snapshots.total} free, {snapshots.owned} owned, {snapshots.fenced} fenced, "
        f"{snapshots.cached} cached; {snapshots.kept} kept, {snapshots.found} begun with, {snapshots.skipped} skipped"
    )


def _masks(masks: stats_pb2.MaskStats) -> str:
    """Format the mask worker's figures."""
    if not masks.written and not masks.orders_waiting and not masks.restarts:
        return "none"
    return (
        f"{masks.written} in {masks.written_s:.3f} s, {masks.grammars_compiled} grammars compiled in "
        f"{masks.grammars_compiled_s:.3f} s, {masks.grammars_known} known, {masks.orders_waiting} orders waiting, "
        f"worker started again {masks.restarts} times"
    )


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) or "none"


def _event(kind: str, event: stats_pb2.EventStats) -> str:
    """Format an event: how often it happened, and how often the chain stayed overlapped."""
    return f"{kind} {event.count} ({event.held} of {event.count - event.idle} without a drained chain)"


def _each(total: float, number: int) -> str:
    return f"{total / number:.0f}" if number else "0"


def _quantiles(quantiles: stats_pb2.Quantiles) -> str:
    if not quantiles.HasField("p50"):
        return "unknown"
    return f"p50 {quantiles.p50 * 1e3:.1f} ms, p99 {quantiles.p99 * 1e3:.1f} ms"
