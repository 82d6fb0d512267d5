"""Spans of completions, as a collector gets them; and what becomes of them where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes

from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.call import SAMPLED, Call, trace_context
from runahead.service.calls.spans import Spans
from runahead.service.settings.server_config import check_extras
from runahead.service.settings.settings import FrontEndSettings, flag_of
from runahead.v1 import GenerateRequest, GetModelInfoRequest
from tests.service.collector import Collector, attributes
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.log_lines import log_lines
from tests.service.rpc_errors import failure
from tests.service.running_service import Service

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METHOD = "runahead.v1.GenerationService/Generate"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def spans(collector: Collector) -> Iterator[Spans]:
    made = Spans(collector.endpoint, "fake", "1.2")
    yield made
    made.close()


@pytest.fixture
def service(tmp_path: Path, spans: Spans) -> Iterator[Service]:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, traces=spans) as running:
        yield running


def generate(service: Service, flags: str = "01", text: str = "secret words") -> Any:
    parent = [("traceparent", f"00-{TRACE}-{PARENT}-{flags}")] if flags else None
    return service.stub.Generate(GenerateRequest(text=text, request_id="r-1"), timeout=TIMEOUT_S, metadata=parent)


def test_a_completion_is_a_span_under_the_callers_with_one_for_each_part(
    service: Service, collector: Collector
) -> None:
    call = generate(service)
    service.engine.output(service.engine.next_submit().handle, [1, 2], FinishReason.LENGTH, cached_tokens=3)
    list(call)
    found = collector.spans(4)
    whole = found["text_completion fake"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert dict(call.initial_metadata())["traceparent"] == f"00-{TRACE}-{whole.span_id.hex()}-01"
    told = attributes(whole)
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "runahead",
        "gen_ai.request.model": "fake",
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": told["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK",
    }
    assert told["gen_ai.usage.input_tokens"] > 0
    parts = [found[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent_span_id for part in parts} == {whole.span_id}
    assert len({span.span_id for span in found.values()}) == 4
    seconds = [(part.end_time_unix_nano - part.start_time_unix_nano) / 1e9 for part in parts]
    assert seconds == pytest.approx([0.25, 0.5, 1.25]), "as the engine says"
    assert parts[0].end_time_unix_nano == parts[1].start_time_unix_nano
    assert parts[1].end_time_unix_nano == parts[2].start_time_unix_nano
    assert whole.start_time_unix_nano <= parts[0].start_time_unix_nano
    assert "secret" not in str(collector.received)


def test_the_names_are_those_of_the_conventions() -> None:
    known = {name for module in (gen_ai_attributes, rpc_attributes) for name in map(str, vars(module).values())}
    call = Call("/runahead.v1.GenerationService/Generate", trace=trace_context((), SAMPLED))
    spans = Spans("http://127.0.0.1:1", "fake", "1")
    call.end()
    assert set(spans._attributes(call)) <= known
    spans.close()


def test_a_completion_that_was_cancelled_or_failed_says_so_and_how_far_it_came(
    service: Service, collector: Collector
) -> None:
    waiting = generate(service)
    service.engine.next_submit()
    next(waiting)
    waiting.cancel()
    found = collector.spans(2)
    told = attributes(found["text_completion fake"])
    assert (told["error.type"], told["rpc.response.status_code"]) == ("CANCELLED", "CANCELLED")
    assert found["text_completion fake"].status.code == 2
    assert "queue" in found
    failing = generate(service)
    service.engine.output(service.engine.next_submit().handle, [], FinishReason.NON_FINITE)
    failure(lambda: list(failing))
    told = attributes(collector.spans(2)["text_completion fake"])
    assert (told["error.type"], told["rpc.response.status_code"]) == ("NON_FINITE", "INTERNAL")


def test_a_trace_that_the_caller_does_not_keep_is_kept_by_nobody_and_one_that_begins_here_is(
    service: Service, collector: Collector
) -> None:
    for flags in ("00", ""):
        call = generate(service, flags)
        service.engine.output(service.engine.next_submit().handle, [1], FinishReason.LENGTH)
        list(call)
    service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
    whole = collector.spans(4)["text_completion fake"]
    assert whole.trace_id.hex() != TRACE and whole.parent_span_id == b""
    assert sum(len(scope.spans) for m in collector.received for r in m.resource_spans for scope in r.scope_spans) == 4


def ended_call() -> Call:
    call = Call("/runahead.v1.GenerationService/Generate", trace=trace_context((), SAMPLED))
    call.end()
    return call


def test_a_collector_that_does_not_answer_holds_nothing_up_and_what_is_too_much_is_dropped(
    collector: Collector, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    collector.answers.clear()
    for _ in range(100):
        spans.ended(ended_call())
    assert collector.asked.wait(TIMEOUT_S)
    for _ in range(9900):
        spans.ended(ended_call())  # returns, while nobody answers
    assert "Queue full, dropping" in caplog.text
    collector.answers.set()
    spans._processor.force_flush()
    sent = sum(len(scope.spans) for m in collector.received for r in m.resource_spans for scope in r.scope_spans)
    assert 4096 <= sent <= 4096 + 100  # those that were with the collector already


def test_spans_that_no_collector_takes_are_counted_as_dropped() -> None:
    with log_lines() as lines:
        away = Spans("http://127.0.0.1:1", "fake", "1")
        away.ended(ended_call())
        away._processor.force_flush()
        assert lines.next("spans_not_sent")["dropped"] == 1
        away.close()


def test_the_setting_without_the_extra_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FrontEndSettings(otlp_endpoint="http://127.0.0.1:4317")
    check_extras(settings, flag_of)
    monkeypatch.setattr("runahead.service.settings.server_config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint needs the extra otel, .* 'runahead-server\[otel\]'"):
        check_extras(settings, flag_of)
    check_extras(FrontEndSettings(), flag_of)


@pytest.mark.parametrize(
    "endpoint", ["collector", "collector:4317", "grpc://c:1", "http://c", "http://c:x", "http://u@c:1", "http://c:1/v1"]
)
def test_an_endpoint_that_is_none_is_refused_by_a_sentence(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT"):
        check_extras(FrontEndSettings(otlp_endpoint=endpoint), flag_of)
