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
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

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
    TokenIds,
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
    with local_service(["--log-level", "debug", "--otlp-endpoint", collector.endpoint, "--vllm-facade"]) as running:
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
    port = service.ports["service"]
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


PARAMETERS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # sampling, stopping and output of ours, and the same as the facade's parameters
    ({"temperature": 0.0}, {"max_tokens": 40}, {}, {"temperature": 0.0, "max_tokens": 40}),
    (
        {"seed": 7, "temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
        {"max_tokens": 40, "ignore_eos": True},
        {"logprobs": 2, "prompt_logprobs": 1},
        {
            **{"seed": 7, "temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
            **{"max_tokens": 40, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1},
        },
    ),
    (
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}},
        {"max_tokens": 60, "min_tokens": 3, "stop": ["\n", "e"], "include_stop": True},
        {},
        {
            **{"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}},
            **{"max_tokens": 60, "min_tokens": 3, "stop": ["\n", "e"], "include_stop_str_in_output": True},
            "skip_special_tokens": True,
        },
    ),
]


@pytest.mark.parametrize(("sampling", "stopping", "output", "params"), PARAMETERS)
def test_the_facade_generates_the_tokens_that_our_own_service_does(
    channel: grpc.Channel, sampling: Any, stopping: Any, output: Any, params: Any
) -> None:
    ours, theirs = GenerationServiceStub(channel), vllm_engine_pb2_grpc.VllmEngineStub(channel)
    ids = list(ours.Tokenize(TokenizeRequest(text="def read(path):\n"), timeout=TIMEOUT_S).token_ids)
    request = GenerateOnceRequest(
        token_ids=TokenIds(ids=ids),
        sampling=SamplingOptions(**sampling),
        stopping=StoppingOptions(**stopping),
        output=OutputOptions(**output),
    )
    whole = ours.GenerateOnce(request, timeout=TIMEOUT_S)
    expected = [token.id for token in whole.tokens]
    for stream in (True, False):
        asked = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=pb.SamplingParams(**params), stream=stream
        )
        *chunks, end = theirs.Generate(asked, timeout=TIMEOUT_S)
        assert bool(chunks) == stream
        assert list(end.complete.output_ids) == expected and expected
        if stream:
            assert [token for each in chunks for token in each.chunk.token_ids] == expected
        assert end.complete.matched_stop_str == whole.finished.stop.text
        scored = [each.chunk for each in chunks] if stream else [end.complete]
        values = [value for each in scored for value in each.output_logprobs.token_logprobs]
        assert values == [token.logprob for token in whole.tokens if token.HasField("logprob")]
        assert list(scored[0].input_logprobs.token_ids) == [token.id for token in whole.prompt.tokens]
