"""Prometheus metrics of the service: calls under the names of gRPC servers, and held resources, read from the board."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from runahead.service.shared_memory.board import REFUSALS, Board
from runahead.service.shared_memory.call_table import BOUNDS_S, CODES
from runahead.service.shared_memory.held import Resource
from runahead.service.stats.metrics_families import add_histogram, counter, counters, from_zero, gauge, gauges

_METHOD = ("grpc_type", "grpc_service", "grpc_method")


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
    yield counters("runahead_refusals", "Calls that were refused, by reason.", "reason", refusals)
    memory = {process.name: process.resident_bytes for process in processes}
    yield gauges("runahead_process_resident_memory_bytes", "Memory that a process holds.", "process", memory)
    descriptors = {process.name: process.descriptors for process in processes}
    yield gauges("runahead_process_open_fds", "File descriptors that a process holds.", "process", descriptors)
    dropped = {process.name: process.log_lines_dropped for process in processes}
    yield counters("runahead_log_lines_dropped", "Lines of its log that were not written.", "process", dropped)


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
            add_histogram(times, method, BOUNDS_S, figures.times, figures.sum_s)
    yield from (started, handled, times)
