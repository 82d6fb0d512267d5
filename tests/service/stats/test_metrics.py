"""/metrics: names, types and values as Prometheus reads them, of all processes together and of no caller or request."""

from __future__ import annotations

import itertools
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client.parser import text_string_to_metric_families

from runahead.runtime.wire.figures import BOUNDS_S
from runahead.service.calls.admission import RIGHTS_FOR
from runahead.service.calls.call import HEALTH
from runahead.service.servers.supervised import GENERATION
from runahead.service.shared_memory.board import Board, ProcessFigures
from runahead.service.shared_memory.call_tables import CODES, METHODS, CallTable, Resource
from runahead.service.stats.metrics_server import MetricsServer, ServiceCollector
from runahead.v1 import GenerateRequest, StatsRequest, TokenizeRequest, WatchStatsRequest
from tests.service.fake_engine import INFO, STATS, TIMEOUT_S
from tests.service.rpc_errors import failure
from tests.service.running_service import Service

GENERATE = f"/{GENERATION}/Generate"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
# What others read by these names.
USUAL = {
    "grpc_server_started": COUNTER,
    "grpc_server_handled": COUNTER,
    "grpc_server_handling_seconds": HISTOGRAM,
    "vllm:num_requests_running": GAUGE,
    "vllm:num_requests_waiting": GAUGE,
    "vllm:kv_cache_usage_perc": GAUGE,
    "vllm:cache_config_info": GAUGE,
    "vllm:num_preemptions": COUNTER,
    "vllm:prefix_cache_queries": COUNTER,
    "vllm:prefix_cache_hits": COUNTER,
    "vllm:prompt_tokens": COUNTER,
    "vllm:generation_tokens": COUNTER,
    "vllm:request_success": COUNTER,
    "vllm:time_to_first_token_seconds": HISTOGRAM,
    "vllm:inter_token_latency_seconds": HISTOGRAM,
    "vllm:e2e_request_latency_seconds": HISTOGRAM,
    "vllm:request_queue_time_seconds": HISTOGRAM,
}
OWN_GAUGES = (
    "info engine_up front_ends open_streams queued_tokens tokenizing_bytes tokenizer_queue structure_queue uploads "
    "unread_bytes stats_watchers connections process_resident_memory_bytes process_open_fds kv_blocks paused_requests "
    "state_snapshots mask_queue overlap_ratio preparing_requests ledger_depth ledger_depth_max run_ahead "
    "tokens_per_launch row_slots penalty_slots"
)
OWN_COUNTERS = (
    "stop_strings cancelled slow_readers refusals recomputed_tokens void_rows held_rows drafted_tokens "
    "accepted_drafts front_ends_lost launches rank_wait_seconds "
    "device_busy_seconds device_idle_seconds device_idle_inside_seconds host_seconds graph_captures graph_replays "
    "fallbacks barriers barrier_seconds structures_compiled structure_hits structure_compile_seconds "
    "masks mask_seconds grammars_compiled grammar_compile_seconds grammar_hits mask_worker_restarts "
    "state_snapshots_kept state_snapshots_found state_snapshots_skipped log_lines_dropped"
)
OWN = {f"runahead_{name}": GAUGE for name in OWN_GAUGES.split()} | {
    f"runahead_{name}": COUNTER for name in OWN_COUNTERS.split()
}
OF_THE_ENGINE = {name for name in USUAL if name.startswith("vllm:")} | {
    f"runahead_{name}"
    for name in "kv_blocks paused_requests preparing_requests overlap_ratio ledger_depth ledger_depth_max run_ahead "
    "tokens_per_launch recomputed_tokens void_rows held_rows drafted_tokens accepted_drafts front_ends_lost launches "
    "device_busy_seconds device_idle_seconds rank_wait_seconds row_slots penalty_slots "
    "device_idle_inside_seconds host_seconds graph_captures graph_replays fallbacks barriers barrier_seconds "
    "state_snapshots state_snapshots_kept state_snapshots_found state_snapshots_skipped "
    "mask_queue masks mask_seconds grammars_compiled grammar_compile_seconds grammar_hits mask_worker_restarts".split()
}

Families = dict[str, Any]


class Scraped:
    """A server of metrics over a board of two lines, and an engine's answer. board, answer: as a test sets them."""

    def __init__(self) -> None:
        self.board = Board(2)
        stats = msgspec.structs.replace(STATS, events={**STATS.events, "evicted": STATS.events["paused"]})
        self.answer: Any = (INFO, stats)
        self.server = MetricsServer("127.0.0.1", 0, ServiceCollector(self.board, "0.1.0", lambda: self.answer))

    def text(self, path: str = "/metrics", **headers: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return str(response.read().decode())

    def families(self) -> Families:
        return {family.name: family for family in text_string_to_metric_families(self.text())}


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    server = Scraped()
    yield server
    server.server.close()


def value(families: Families, family: str, sample: str = "", **labels: str) -> float:
    """Of the one sample that has these labels."""
    (found,) = [
        each.value
        for each in families[family].samples
        if each.name == (sample or family) and labels.items() <= each.labels.items()
    ]
    return float(found)


# ---------------------------------------------------------------- names and values


def test_every_family_has_the_name_and_the_type_that_others_read_and_says_what_it_is(scraped: Scraped) -> None:
    families = scraped.families()
    assert {name: family.type for name, family in families.items()} == USUAL | OWN
    assert [name for name, family in families.items() if not family.documentation.endswith(".")] == []
    for family in families.values():
        suffixes = {sample.name.removeprefix(family.name) for sample in family.samples}
        expected = {GAUGE: {""}, COUNTER: {"_total"}, HISTOGRAM: {"_bucket", "_count", "_sum"}}[family.type]
        assert suffixes in (expected, set()), f"{family.name}: dashboards look for {expected}"


def test_the_engine_s_figures_stand_under_the_usual_names(scraped: Scraped) -> None:
    families = scraped.families()
    of_model = {"model_name": "fake", "engine": "0"}
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 23 / 63,
        "num_preemptions_total": 2,
        "prefix_cache_queries_total": 64,
        "prefix_cache_hits_total": 48,
        "prompt_tokens_total": 70,
        "generation_tokens_total": 80,
    }
    for name, number in expected.items():
        assert value(families, f"vllm:{name.removesuffix('_total')}", f"vllm:{name}", **of_model) == number
    (config,) = families["vllm:cache_config_info"].samples
    assert (config.value, config.labels["block_size"], config.labels["num_gpu_blocks"]) == (1, "16", "63")
    ended = {sample.labels["finished_reason"]: sample.value for sample in families["vllm:request_success"].samples}
    assert ended == {"stop": 0, "length": 3, "abort": 0}


def test_ends_of_every_kind_are_one_of_those_that_others_know(scraped: Scraped) -> None:
    reasons = ("END_OF_SEQUENCE", "STOP", "LENGTH", "CONTEXT_LENGTH", "ABORTED", "CANCELLED", "NON_FINITE")
    finished = {reason: 1 << place for place, reason in enumerate(reasons)}
    scraped.answer = (INFO, msgspec.structs.replace(STATS, finished=finished))
    samples = scraped.families()["vllm:request_success"].samples
    ended = {sample.labels["finished_reason"]: sample.value for sample in samples}
    assert ended == {"stop": 3, "length": 12, "abort": 48, "non_finite": 64}


def test_a_histogram_of_the_engine_is_whole_and_grows_from_bound_to_bound(scraped: Scraped) -> None:
    counts = [place % 7 for place in range(len(BOUNDS_S) + 1)]
    times = type(STATS.queue)(counts, 12.5)
    scraped.answer = (INFO, msgspec.structs.replace(STATS, queue=times))
    samples = scraped.families()["vllm:request_queue_time_seconds"].samples
    buckets = [(float(each.labels["le"]), each.value) for each in samples if each.name.endswith("_bucket")]
    assert buckets == [(BOUNDS_S[place], sum(counts[: place + 1])) for place in range(0, 81, 2)] + [
        (float("inf"), sum(counts))
    ]
    others = {each.name.rpartition("_")[2]: each.value for each in samples if not each.name.endswith("_bucket")}
    assert others == {"count": sum(counts), "sum": 12.5}


def test_our_own_figures_are_those_of_the_engine_and_the_sums_over_all_lines(scraped: Scraped) -> None:
    for index in (0, 1):
        line = scraped.board.line(index)
        line.front_ends, line.unread_bytes, line.slow_readers = 1, 48, 3
        line.held.add(9, {Resource.STREAMS: 2, Resource.QUEUED_TOKENS: 100, Resource.TOKENIZING_BYTES: 1000})
        line.refuse("STREAMS_LIMIT")
        line.calls.started(GENERATE)
        line.calls.ended(GENERATE, 0, 0.02 * (index + 1))
    scraped.board.line(1).refuse("NO_RIGHT")
    scraped.board.processes.write(iter([ProcessFigures("engine", 7, 1 << 30, 12)]), 5)
    scraped.board.processes.dropped_lines("engine")[0] = 4
    families = scraped.families()
    for name, number in {
        "overlap_ratio": 0.98,
        "ledger_depth": 1,
        "front_ends": 2,
        "unread_bytes": 96,
        "connections": 5,
        "engine_up": 1,
    }.items():
        assert value(families, f"runahead_{name}") == number, name
    snapshots = {"state_snapshots_kept": 5, "state_snapshots_found": 3, "state_snapshots_skipped": 7}
    for name, number in {"device_idle_seconds": 0.25, "slow_readers": 6, "host_seconds": 0.5, **snapshots}.items():
        assert value(families, f"runahead_{name}", f"runahead_{name}_total") == number, name
    for name, labels, number in (
        ("fallbacks", {"reason": "host_device"}, 100),
        ("barriers", {"reason": "shutdown"}, 1),
        ("barrier_seconds", {"reason": "shutdown"}, 0.125),
        ("launches", {"kind": "decode"}, 90),
        ("refusals", {"reason": "STREAMS_LIMIT"}, 2),
        ("refusals", {"reason": "NO_RIGHT"}, 1),
    ):
        assert value(families, f"runahead_{name}", f"runahead_{name}_total", **labels) == number, name
    assert value(families, "runahead_kv_blocks", state="owned") == 20
    assert value(families, "runahead_state_snapshots", state="cached") == 2
    for name, free in (("row", 5), ("penalty", 13)):
        for state, number in {"free": free, "owned": 2, "fenced": 1}.items():
            assert value(families, f"runahead_{name}_slots", state=state) == number, name
    assert value(families, "runahead_process_resident_memory_bytes", process="engine") == 1 << 30
    assert value(families, "runahead_process_open_fds", process="engine") == 12
    assert value(families, "runahead_log_lines_dropped", "runahead_log_lines_dropped_total", process="engine") == 4
    assert value(families, "runahead_info", version="0.1.0") == 1
    method = {"grpc_type": "server_stream", "grpc_service": GENERATION, "grpc_method": "Generate"}
    assert value(families, "grpc_server_started", "grpc_server_started_total", **method) == 2
    assert value(families, "grpc_server_handled", "grpc_server_handled_total", **method, grpc_code="OK") == 2
    times = "grpc_server_handling_seconds"
    assert value(families, times, f"{times}_sum", **method) == pytest.approx(0.06)
    assert [value(families, times, f"{times}_bucket", **method, le=le) for le in ("0.01", "0.025", "0.05", "+Inf")] == [
        0,
        1,
        2,
        2,
    ]


def test_what_is_held_is_nobody_s_any_more_once_a_line_is_written_anew(scraped: Scraped) -> None:
    scraped.board.line(0).held.add(9, {Resource.QUEUED_TOKENS: 100, Resource.UPLOADS: 3})
    families = scraped.families()
    assert value(families, "runahead_queued_tokens") == 100 and value(families, "runahead_uploads") == 3
    scraped.board.clear(0)
    assert value(scraped.families(), "runahead_queued_tokens") == 0


def test_without_an_answer_of_the_engine_its_figures_are_not_there(scraped: Scraped) -> None:
    scraped.answer = None
    families = scraped.families()
    assert value(families, "runahead_engine_up") == 0
    assert set(families) == (USUAL | OWN).keys() - OF_THE_ENGINE


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=underscores,text/plain;version=1.0.0;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.2",
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
    ],
)
def test_names_are_the_same_whatever_format_somebody_asks_for(scraped: Scraped, accept: str) -> None:
    families = text_string_to_metric_families(scraped.text(Accept=accept))
    assert {family.name for family in families} == (USUAL | OWN).keys()


# ---------------------------------------------------------------- calls


def test_every_method_that_is_served_is_counted_under_its_name() -> None:
    named = {f"/{service}/{method}" for _, service, method in METHODS[:-1]}
    assert named == RIGHTS_FOR.keys() | HEALTH
    types = {method: kind for kind, _, method in METHODS}
    assert [name for name, kind in types.items() if kind == "server_stream"] == [
        "Generate",
        "WatchStats",
        "Watch",
        "GetTokenizer",
        "SubscribeKvEvents",
    ]


def test_codes_have_the_names_that_grpc_s_other_servers_use() -> None:
    by_number = sorted(grpc.StatusCode, key=lambda code: int(code.value[0]))
    names = ["".join(part.capitalize() for part in code.name.split("_")) for code in by_number]
    assert [{"Ok": "OK", "Cancelled": "Canceled"}.get(name, name) for name in names] == list(CODES)


def calls_of(service: Service) -> dict[str, tuple[int, dict[str, int]]]:
    """Calls that have come and those that have ended by code, of methods that were called."""
    board = service.front_end.servicer._board
    return {
        method: (figures.started, {code: count for code, count in zip(CODES, figures.ended, strict=True) if count})
        for (_, _, method), figures in board.calls.total()
        if figures.started
    }


def until_counted(service: Service, expected: dict[str, tuple[int, dict[str, int]]]) -> None:
    """A client has a call's status before the server has done with the call."""
    while (counted := calls_of(service)) != expected:
        assert sum(started for started, _ in counted.values()) <= sum(started for started, _ in expected.values())


def test_a_call_is_counted_when_it_comes_and_as_it_ends(service: Service) -> None:
    stub = service.stub
    stub.Tokenize(TokenizeRequest(text="x"), timeout=TIMEOUT_S)
    failure(lambda: list(stub.WatchStats(WatchStatsRequest(interval=Duration()), timeout=TIMEOUT_S)))
    for name in ("first", "second"):  # the callers' choice, both, and no names of ours
        nothing: Any = service.channel.unary_unary(f"/{GENERATION}/{name}")
        failure(lambda nothing=nothing: nothing(b"", timeout=TIMEOUT_S))  # type: ignore[misc]
    open_call = stub.Generate(GenerateRequest(text="once"), timeout=TIMEOUT_S)
    assert next(open_call).HasField("accepted")
    expected: dict[str, tuple[int, dict[str, int]]] = {
        "WatchStats": (1, {"InvalidArgument": 1}),
        "Tokenize": (1, {"OK": 1}),
        "unknown": (2, {"Unimplemented": 2}),
        "Generate": (1, {}),
    }
    until_counted(service, expected)
    open_call.cancel()
    until_counted(service, expected := expected | {"Generate": (1, {"Canceled": 1})})
    failure(lambda: list(stub.Generate(GenerateRequest(text="late"), timeout=0.2)))
    until_counted(service, expected := expected | {"Generate": (2, {"Canceled": 1, "DeadlineExceeded": 1})})
    service.engine.die()
    failure(lambda: stub.Stats(StatsRequest(), timeout=TIMEOUT_S))
    until_counted(service, expected | {"Stats": (1, {"Unavailable": 1})})


def test_a_line_goes_on_from_what_was_counted_before_and_leaves_the_others_alone() -> None:
    words = memoryview(bytearray(CallTable.size(2) * 8)).cast("q")
    table = CallTable(words, 2)
    for line, _ in itertools.product((0, 1, 1), range(2)):
        table.line(line).started(GENERATE)
    table.line(1).ended(GENERATE, 16, 1000.0)
    (figures,) = [each for (_, service, method), each in table.total() if f"/{service}/{method}" == GENERATE]
    assert (figures.started, figures.ended[16], figures.times[-1], figures.sum_s) == (6, 1, 1, 1000.0)
    assert sum(figures.started for _, figures in table.total()) == 6


# ---------------------------------------------------------------- over HTTP


def test_only_metrics_are_served_and_only_read(scraped: Scraped) -> None:
    for path in ("/", "/metrics/", "/favicon.ico", "/anything"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            scraped.text(path)
        assert refused.value.code == 404
        refused.value.close()
    url = f"http://127.0.0.1:{scraped.server.port}/metrics"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, data=b"x"), timeout=TIMEOUT_S)
    assert refused.value.code == 405
    refused.value.close()


def test_a_page_is_whole_whatever_names_somebody_asks_for(scraped: Scraped) -> None:
    assert scraped.text("/metrics?name[]=runahead_info") == scraped.text()


def test_calls_of_a_front_end_that_died_have_ended_and_no_more_than_once() -> None:
    board = Board(2)
    line, method = board.line(0).calls, "/runahead.v1.GenerationService/Generate"
    for _ in range(3):
        line.started(method)
    line.ended(method, 0, 0.01)
    for _ in range(2):
        board.clear(0)
        figures = dict(board.calls.total())["server_stream", "runahead.v1.GenerationService", "Generate"]
        by_code = dict(zip(CODES, figures.ended, strict=True))
        assert (figures.started, by_code["OK"], by_code["Unavailable"], sum(by_code.values())) == (3, 1, 2, 3)
        assert sum(figures.times) == 1, "how long the others took nobody knows"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_it_listens_on_any_address_and_asks_nobody_what_that_is_called(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(name: str = "") -> str:
        asked.append(name)
        return name

    monkeypatch.setattr(socket, "getfqdn", ask)
    server = MetricsServer(host, 0, ServiceCollector(Board(), "0.1.0", lambda: None))
    url = f"http://{f'[{host}]' if host == '::1' else host}:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        assert b"runahead_info" in response.read()
    server.close()
    assert asked == []


def test_a_port_that_is_taken_is_said(scraped: Scraped, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="can't be listened on"):
        MetricsServer("127.0.0.1", scraped.server.port, ServiceCollector(Board(), "", lambda: None))


def test_no_label_is_a_caller_s_choice(scraped: Scraped) -> None:
    """Names of models and reasons are the server's; what a caller chooses would be a label for each, and shown."""
    text = scraped.text()
    labels = set(re.findall(r'[{,](\w+)="', text))
    assert labels <= {
        "version", "model_name", "engine", "block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype",
        "finished_reason", "le", "state", "kind", "reason", "process", "grpc_type", "grpc_service", "grpc_method",
        "grpc_code", "place", "rank",
    }  # fmt: skip
