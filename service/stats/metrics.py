"""The metrics of the engine and of the service, for Prometheus.

The engine's have vLLM's names where they exist, which dashboards, autoscalers and the Gateway API inference extension
read; their meaning is in https://docs.vllm.ai/en/latest/usage/metrics/ and
https://docs.vllm.ai/en/latest/design/metrics/. Calls have the names of gRPC servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from runahead.runtime.wire.figures import BARRIERS, BOUNDS_S, FALLBACKS, EngineStats, HistogramStats
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.shared_memory.board import REFUSALS, Board
from runahead.service.shared_memory.call_tables import BOUNDS_S as CALL_BOUNDS_S
from runahead.service.shared_memory.call_tables import CODES, Resource

_STEP = 2  # every second bound of the engine's: 58 % apart, half the size of a scrape

# vLLM's finish reasons, by the engine's.
_FINISHED: Final = {
    "END_OF_SEQUENCE": "stop",
    "STOP": "stop",
    "LENGTH": "length",
    "CONTEXT_LENGTH": "length",
    "ABORTED": "abort",
    "CANCELLED": "abort",
}

_METHOD = ("grpc_type", "grpc_service", "grpc_method")

Values = float | Mapping[str, float]


def gauge(name: str, what: str, value: Values, labels: Mapping[str, str] | None = None, by: str = "") -> Metric:
    """Make a gauge. labels: of all values. by: the label whose values are the keys of `value`."""
    return _filled(GaugeMetricFamily, name, what, value, labels or {}, by)


def counter(name: str, what: str, value: Values, labels: Mapping[str, str] | None = None, by: str = "") -> Metric:
    """Make a counter like a gauge. name: without the suffix `_total`."""
    return _filled(CounterMetricFamily, name, what, value, labels or {}, by)


def _filled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    what: str,
    value: Values,
    labels: Mapping[str, str],
    by: str,
) -> Metric:
    family = kind(name, what, labels=[*labels, by] if by else [*labels])
    for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
        family.add_metric([*labels.values(), key] if by else [*labels.values()], number)
    return family


def from_zero(known: Sequence[str], values: Mapping[str, float]) -> Mapping[str, float]:
    """Add 0 for each known label value without a count: PromQL's `rate` ignores a series' first sample."""
    return {**dict.fromkeys(known, 0), **values}


def engine_histogram(name: str, what: str, times: HistogramStats, labels: Mapping[str, str]) -> Metric:
    """Make a histogram of the engine's times."""
    family = HistogramMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), _cumulative(BOUNDS_S, times.counts, _STEP), times.sum_s)
    return family


def _cumulative(bounds: Sequence[float], counts: Sequence[int], step: int = 1) -> list[tuple[str, float]]:
    """Make Prometheus's cumulative buckets. counts: by bucket, the last above every bound."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for index, (bound, count) in enumerate(zip(bounds, counts, strict=False)):
        below += count
        if index % step == 0:
            buckets.append((str(bound), below))
    return [*buckets, ("+Inf", sum(counts))]


def engine_metrics(info: EngineInfo, stats: EngineStats) -> Iterator[Metric]:
    """Yield all families of the engine."""
    yield from _usual(info, stats)
    yield from _chain(stats)
    blocks = {name: getattr(stats, f"blocks_{name}") for name in ("free", "owned", "fenced", "cached")}
    yield gauge("runahead_kv_blocks", "KV blocks by state.", blocks, by="state")
    for name, total, free, fenced in (
        ("row", stats.rows_total, stats.rows_free, stats.rows_fenced),
        ("penalty", stats.penalty_slots_total, stats.penalty_slots_free, stats.penalty_slots_fenced),
    ):
        slots = {"free": free, "owned": total - free - fenced, "fenced": fenced}
        yield gauge(f"runahead_{name}_slots", f"{name.capitalize()} slots by state.", slots, by="state")
    yield from _snapshots(stats)
    yield gauge("runahead_paused_requests", "Running requests that wait for KV blocks.", stats.paused)
    yield gauge(
        "runahead_preparing_requests", "Requests whose text, chat or structure is being prepared.", stats.preparing
    )
    yield counter("runahead_recomputed_tokens", "Tokens prefilled again after an eviction.", stats.recomputed_tokens)
    yield counter("runahead_void_rows", "Rows whose token was dropped, since their request had ended.", stats.void_rows)
    yield counter(
        "runahead_held_rows", "Rows without a token from a launch, since their mask was late.", stats.held_rows
    )
    for name, what, found in (
        ("drafted_tokens", "Verified draft tokens, by position in a row's drafts.", stats.drafted),
        ("accepted_drafts", "Accepted draft tokens, by position.", stats.accepted),
    ):
        yield counter(f"runahead_{name}", what, {str(position): count for position, count in found.items()}, by="place")
    yield gauge(
        "runahead_tokens_per_launch", "Tokens that a launch has brought of a row, on average.", stats.tokens_per_launch
    )
    yield from _masks(stats)
    yield counter("runahead_front_ends_lost", "Connections of front ends that were lost.", stats.front_ends_lost)


def _snapshots(stats: EngineStats) -> Iterator[Metric]:
    """Yield metrics of recurrent state snapshots."""
    states = {name: getattr(stats, f"snapshots_{name}") for name in ("free", "owned", "fenced", "cached")}
    yield gauge("runahead_state_snapshots", "Snapshots of recurrent states by state.", states, by="state")
    yield counter("runahead_state_snapshots_kept", "Snapshots that could be found from then on.", stats.snapshots_kept)
    yield counter("runahead_state_snapshots_found", "Times that a row began with one.", stats.snapshots_found)
    yield counter(
        "runahead_state_snapshots_skipped", "Places of rows that were to get one and did not.", stats.snapshots_skipped
    )


def _masks(stats: EngineStats) -> Iterator[Metric]:
    """Yield metrics of the mask worker."""
    yield gauge("runahead_mask_queue", "Orders that the mask worker has not carried out.", stats.masks_orders_waiting)
    yield counter("runahead_masks", "Masks of rows with a structure.", stats.masks_written)
    yield counter("runahead_mask_seconds", "What making masks took.", stats.masks_written_s)
    yield counter("runahead_grammars_compiled", "Grammars that it compiled.", stats.masks_grammars_compiled)
    yield counter("runahead_grammar_compile_seconds", "What compiling them took.", stats.masks_grammars_compiled_s)
    yield counter("runahead_grammar_hits", "Requests whose grammar it had compiled before.", stats.masks_grammars_known)
    yield counter("runahead_mask_worker_restarts", "Times that it was started again.", stats.masks_restarts)


def _usual(info: EngineInfo, stats: EngineStats) -> Iterator[Metric]:
    labels = {"model_name": info.model, "engine": "0"}
    held = stats.blocks_owned + stats.blocks_fenced
    config = {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(stats.blocks_total),
        "enable_prefix_caching": str(info.prefix_cache),
        "cache_dtype": info.kv_dtype,
    }
    yield gauge("vllm:num_requests_running", "Requests that have a row.", stats.running, labels)
    yield gauge(
        "vllm:num_requests_waiting", "Requests that wait for a row, KV blocks or a penalty slot.", stats.waiting, labels
    )
    fraction = held / stats.blocks_total if stats.blocks_total else 0.0
    yield gauge(
        "vllm:kv_cache_usage_perc", "KV blocks that requests hold, as a share of all, 0 to 1.", fraction, labels
    )
    yield gauge("vllm:cache_config_info", "What the KV cache is, in labels.", 1, labels | config)
    evicted = stats.events["evicted"].count if "evicted" in stats.events else 0
    yield counter(
        "vllm:num_preemptions",
        "Requests put back in the queue, for KV blocks or for a caller without a row.",
        evicted,
        labels,
    )
    yield counter(
        "vllm:prefix_cache_queries", "Tokens of prompts looked for in the prefix cache.", stats.queried_tokens, labels
    )
    yield counter("vllm:prefix_cache_hits", "Tokens of these that were there.", stats.cached_tokens, labels)
    yield counter("vllm:prompt_tokens", "Tokens of the prompts of admitted requests.", stats.prompt_tokens, labels)
    yield counter("vllm:generation_tokens", "Tokens generated and kept.", stats.generated_tokens, labels)
    finished: Counter[str] = Counter(dict.fromkeys(_FINISHED.values(), 0))
    for reason, count in stats.finished.items():
        finished[_FINISHED.get(reason, reason.lower())] += count
    yield counter(
        "vllm:request_success", "Requests that have ended, by reason.", finished, labels, by="finished_reason"
    )
    for name, what, times in (
        ("time_to_first_token", "From submission to the first token.", stats.first_token),
        ("inter_token_latency", "From one token of a request to its next.", stats.inter_token),
        ("e2e_request_latency", "From submission to the end, of requests that came to a token.", stats.end_to_end),
        ("request_queue_time", "From submission to admission.", stats.queue),
    ):
        yield engine_histogram(f"vllm:{name}_seconds", what, times, labels)


def _chain(stats: EngineStats) -> Iterator[Metric]:
    yield gauge(
        "runahead_overlap_ratio", "Launches enqueued while the one before ran, as a share.", stats.overlap_ratio
    )
    yield gauge("runahead_ledger_depth", "Launches queued and uncommitted.", stats.ledger_depth)
    yield gauge("runahead_ledger_depth_max", "The most that there were.", stats.ledger_depth_max)
    yield gauge("runahead_run_ahead", "The depth that was asked for; 0 is serial.", stats.run_ahead)
    yield counter("runahead_launches", "Launches enqueued, by kind.", stats.launches_by_kind, by="kind")
    yield counter("runahead_device_busy_seconds", "From the start of a launch to its end.", stats.device_busy_s)
    yield counter(
        "runahead_device_idle_seconds", "Between launches, those after an idle chain left out.", stats.device_idle_s
    )
    yield counter(
        "runahead_device_idle_inside_seconds",
        "Of the busy time, at most, without anything to run.",
        stats.device_idle_inside_s,
    )
    waits = {str(rank): seconds for rank, seconds in stats.rank_wait_s.items()}
    yield counter("runahead_rank_wait_seconds", "Waiting for other ranks within launches, by rank.", waits, by="rank")
    yield counter("runahead_host_seconds", "Of the engine's loop itself, without waits.", stats.host_s)
    yield counter("runahead_graph_captures", "Graphs captured.", stats.graph_captures)
    yield counter("runahead_graph_replays", "Graphs replayed.", stats.graph_replays)
    yield counter(
        "runahead_fallbacks",
        "Launches that were not one graph, by reason.",
        from_zero(FALLBACKS, stats.fallbacks),
        by="reason",
    )
    barriers, seconds = from_zero(BARRIERS, stats.barriers), from_zero(BARRIERS, stats.barrier_s)
    yield counter("runahead_barriers", "Drains of the chain, by reason.", barriers, by="reason")
    yield counter("runahead_barrier_seconds", "What drains of the chain cost, by reason.", seconds, by="reason")


def service_metrics(board: Board) -> Iterator[Metric]:
    """Yield all families except the engine's."""
    yield from _calls(board)
    total, held, processes = board.total(), board.held.in_all().tolist(), board.processes.read()
    yield gauge("runahead_front_ends", "Front ends that serve.", total.front_ends)
    yield gauge("runahead_open_streams", "Completions that are open.", total.open_streams)
    yield gauge("runahead_queued_tokens", "Tokens of prompts that wait for a row.", held[Resource.QUEUED_TOKENS])
    waiting = held[Resource.TOKENIZING_BYTES]
    yield gauge("runahead_tokenizing_bytes", "Bytes of text that wait for the tokenizer, or are with it.", waiting)
    yield gauge(
        "runahead_tokenizer_queue", "Texts that wait for the tokenizer, and chats to be rendered.", total.waiting_texts
    )
    yield counter("runahead_structures_compiled", "Structures that were compiled.", total.structures_compiled)
    yield counter("runahead_structure_hits", "Structures that were known already.", total.structure_hits)
    seconds = total.structure_compile_us / 1e6
    yield counter("runahead_structure_compile_seconds", "Time that compiling structures has taken.", seconds)
    yield gauge("runahead_structure_queue", "Structures that wait to be compiled.", total.waiting_structures)
    yield gauge("runahead_uploads", "Calls whose request is not there whole.", held[Resource.UPLOADS])
    yield gauge("runahead_unread_bytes", "Of tokens that no stream has taken yet, as estimated.", total.unread_bytes)
    yield gauge("runahead_stats_watchers", "Calls of WatchStats that are open.", total.stats_watchers)
    yield gauge("runahead_connections", "Connections open on the service's port.", board.processes.connections)
    yield counter("runahead_stop_strings", "Completions that a stop string ended.", total.stop_strings)
    yield counter("runahead_cancelled", "Completions whose client went away or was too late.", total.cancelled)
    yield counter("runahead_slow_readers", "Completions that ended since too much was unread.", total.slow_readers)
    refusals = from_zero(REFUSALS, board.refusals())
    yield counter("runahead_refusals", "Calls that were refused, by reason.", refusals, by="reason")
    memory = {process.name: process.resident_bytes for process in processes}
    yield gauge("runahead_process_resident_memory_bytes", "Memory that a process holds.", memory, by="process")
    descriptors = {process.name: process.descriptors for process in processes}
    yield gauge("runahead_process_open_fds", "File descriptors that a process holds.", descriptors, by="process")
    dropped = {process.name: process.log_lines_dropped for process in processes}
    yield counter("runahead_log_lines_dropped", "Lines of its log that were not written.", dropped, by="process")


def _calls(board: Board) -> Iterator[Metric]:
    """Yield metrics of methods that were called."""
    started = CounterMetricFamily("grpc_server_started", "Calls that have come to the server.", labels=_METHOD)
    handled = CounterMetricFamily(
        "grpc_server_handled", "Calls that have ended on the server, however they did.", labels=(*_METHOD, "grpc_code")
    )
    times = HistogramMetricFamily("grpc_server_handling_seconds", "From a call's headers to its end.", labels=_METHOD)
    for method, figures in board.calls.total():
        if figures.started:
            started.add_metric(method, figures.started)
            for code, count in zip(CODES, figures.ended, strict=True):
                if count:
                    handled.add_metric((*method, code), count)
            times.add_metric(method, _cumulative(CALL_BOUNDS_S, figures.times), figures.sum_s)
    yield from (started, handled, times)
