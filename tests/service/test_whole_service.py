"""A whole service, all its processes, with all that it says of its calls turned on."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from benchmarks.local_service import LocalService, local_service
from runahead.v1 import (
    AbortRequest,
    GenerateOnceRequest,
    GenerateRequest,
    GenerationServiceStub,
    OutputOptions,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
    TokenizeRequest,
)
from tests.service.collector import Collector
from tests.service.raw_http2 import GOAWAY, PING, RawClient

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def service(collector: Collector) -> Iterator[LocalService]:
    with local_service(["--log-level", "debug", "--otlp-endpoint", collector.endpoint]) as running:
        yield running


@pytest.fixture
def channel(service: LocalService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.url) as opened:
        yield opened


def lines_when(service: LocalService, there: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """The lines of the log, when those that are asked for are there."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        text = service.log.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if there(lines):
            return lines
        time.sleep(0.02)
    raise AssertionError(f"the log has no such lines:\n{text}")


class Secrets:
    """Texts that nobody can have by chance, and whether any of them is in a log."""

    def __init__(self) -> None:
        self._made: list[str] = []

    def new(self) -> str:
        self._made.append(secrets.token_hex(12))
        return self._made[-1]

    def found(self, text: str) -> list[str]:
        return [secret for secret in self._made if secret in text]


def test_nothing_that_a_caller_says_is_in_any_line_of_any_process_or_in_any_span(
    service: LocalService, channel: grpc.Channel, collector: Collector
) -> None:
    said, stub = Secrets(), GenerationServiceStub(channel)
    names = iter(f"quiet-{number}" for number in range(100))

    def request(**options: Any) -> GenerateRequest:
        options = {"stopping": StoppingOptions(max_tokens=20, stop=[said.new()]), **options}
        return GenerateRequest(text=f"def {said.new()}(", request_id=next(names), cache_salt=said.new(), **options)

    scored = OutputOptions(logprobs=2, prompt_logprobs=1, echo=True)
    texts = []
    for seed in range(5):
        events = stub.Generate(request(sampling=SamplingOptions(seed=seed), output=scored), timeout=TIMEOUT_S)
        texts.append("".join(event.delta.text for event in events))
    fields = {field.name: value for field, value in request().ListFields()}
    stub.GenerateOnce(GenerateOnceRequest(**fields), timeout=TIMEOUT_S)
    endless = StoppingOptions(max_tokens=1000, ignore_eos=True, stop=[said.new()])
    cancelled = stub.Generate(request(stopping=endless), timeout=TIMEOUT_S)
    next(cancelled), next(cancelled)
    cancelled.cancel()
    stub.Tokenize(TokenizeRequest(text=said.new()), timeout=TIMEOUT_S)
    generate: Any = channel.unary_stream("/runahead.v1.GenerationService/Generate")
    refused: list[Callable[[], object]] = [
        lambda: list(stub.Generate(request(output=OutputOptions(logprobs=99)), timeout=TIMEOUT_S)),
        lambda: list(stub.Generate(GenerateRequest(text=said.new(), request_id="no id"), timeout=TIMEOUT_S)),
        lambda: list(generate(b"\x12\x20" + said.new().encode(), timeout=TIMEOUT_S)),
        lambda: stub.Abort(AbortRequest(request_ids=[said.new() + "/"]), timeout=TIMEOUT_S),
        lambda: stub.Stats(
            StatsRequest(), timeout=TIMEOUT_S, metadata=[("x-request-id", f"{said.new()} {said.new()}")]
        ),
        lambda: stub.Stats(StatsRequest(), timeout=TIMEOUT_S, metadata=[("authorization", f"Bearer {said.new()}")]),
    ]
    for call in refused:
        with contextlib.suppress(grpc.RpcError):
            call()

    def all_there(lines: list[dict[str, Any]]) -> bool:
        ended = [line["method"].rpartition("/")[2] for line in lines if line["event"] == "call"]
        return all(ended.count(method) >= count for method, count in counts.items())

    counts = {"Generate": 9, "GenerateOnce": 1, "Tokenize": 1, "Abort": 1, "Stats": 2}
    lines = lines_when(service, all_there)
    log = "\n".join(str(line) for line in lines)
    assert not said.found(log)
    assert len(said._made) > 30
    spans = collector.spans(4 * 6)  # of six completions that had tokens
    assert {"text_completion bundled", "queue", "prefill", "decode"} <= set(spans)
    assert not said.found(str(collector.received))
    assert not [text for text in texts if len(text) > 8 and text in log]
    assert {line["level"] for line in lines} >= {"debug", "info"}
    assert {"engine_ready", "serving", "call"} <= {line["event"] for line in lines}, "of all processes"


def test_what_a_client_has_the_library_print_forges_no_line_and_is_bounded(
    service: LocalService, channel: grpc.Channel
) -> None:
    """The text of a connection's last frame is printed by gRPC's core as it is."""
    forged = b'words\n{"event": "forged", "level": "info"}\n\x1b[2J'
    port = int(service.url.rpartition(":")[2])
    for _ in range(100):
        with RawClient(port) as client:
            client.send(GOAWAY, bytes(7) + b"\x02" + forged)
            client.send(PING, bytes(8))
            client.frames_until(PING)
    GenerationServiceStub(channel).Stats(StatsRequest(), timeout=TIMEOUT_S)  # a bystander is served

    def printed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if line["event"] == "library_line"]

    lines = lines_when(service, lambda lines: len(printed(lines)) > 0)  # each of which is JSON
    assert any("words" in line["message"] for line in printed(lines)), "the library has printed it"
    assert not [line for line in lines if line["event"] == "forged"]
    assert len(printed(lines)) <= 60, "twenty of each place in a minute"
