"""Requests with a structure against a whole service: what comes out, what ends it, and what it costs others."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2

from benchmarks.local_service import LocalService, local_service
from runahead.runtime.masks.mask_worker import WORKER_MODULE
from runahead.service import cli
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.structures.structures import COMPILE_MODULE
from runahead.v1 import (
    Choice,
    FinishReason,
    GenerateOnceRequest,
    GenerateOnceResponse,
    GenerateRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
    Structure,
)
from tests.service.broken_structures import BROKEN
from tests.service.rpc_errors import code, detail, failure, fields
from tests.service.service_processes import running

TIMEOUT_S = 110.0
MARGIN_S = 40.0  # of what takes a second at most where nothing else runs: `make bench ARGS=structure` measures it
END = FinishReason.FINISH_REASON_END_OF_SEQUENCE
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "日"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with local_service(["--frontends", "1"]) as running_:
        yield running_


@pytest.fixture
def stub(service: LocalService) -> Iterator[GenerationServiceStub]:
    with grpc.insecure_channel(service.url) as channel:
        yield GenerationServiceStub(channel)


def once(stub: GenerationServiceStub, structure: Structure, **fields_: Any) -> GenerateOnceResponse:
    fields_.setdefault("sampling", SamplingOptions(seed=5))
    fields_.setdefault("stopping", StoppingOptions(max_tokens=600))
    return stub.GenerateOnce(GenerateOnceRequest(text="def f(", structure=structure, **fields_), timeout=TIMEOUT_S)


PLAIN = GenerateOnceRequest(
    text="class A:",
    sampling=SamplingOptions(seed=9),
    stopping=StoppingOptions(max_tokens=80, ignore_eos=True),
)


def plain(stub: GenerationServiceStub) -> list[int]:
    """The tokens of a request without a structure."""
    return [token.id for token in stub.GenerateOnce(PLAIN, timeout=TIMEOUT_S).tokens]


def reason(error: grpc.RpcError) -> str:
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


def test_the_service_says_that_it_takes_structures(stub: GenerationServiceStub) -> None:
    assert stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).engine.structures


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_is_valid_by_its_schema(stub: GenerationServiceStub, temperature: float) -> None:
    for seed in range(3):
        sampling = SamplingOptions(seed=seed, temperature=temperature)
        made = once(stub, Structure(json_schema=json.dumps(PERSON)), sampling=sampling)
        assert made.finished.reason == END, made.text
        jsonschema.validate(json.loads(made.text), PERSON, jsonschema.Draft202012Validator)


def test_an_expression_matches_a_choice_is_one_of_its_texts_and_a_grammar_is_kept_to(
    stub: GenerationServiceStub,
) -> None:
    for seed in range(4):
        sampling = SamplingOptions(seed=seed)
        made = once(stub, Structure(regex=r"[A-Z]{2}-\d{3}(é|日)"), sampling=sampling)
        assert made.finished.reason == END and re.fullmatch(r"[A-Z]{2}-\d{3}(é|日)", made.text)
        made = once(stub, Structure(choice=Choice(texts=["yes", "no", 'may"be'])), sampling=sampling)
        assert made.finished.reason == END and made.text in ("yes", "no", 'may"be')
        made = once(stub, Structure(grammar='start: "<" a ">"\na: "x" a | "y"'), sampling=sampling)
        assert made.finished.reason == END and re.fullmatch(r"<x*y>", made.text)


def test_an_object_of_json_is_one_or_ends_at_its_length(stub: GenerationServiceStub) -> None:
    made = once(stub, Structure(json_object=True), stopping=StoppingOptions(max_tokens=60))
    assert made.text.startswith("{")
    if made.finished.reason == END:
        assert isinstance(json.loads(made.text), dict)
    else:
        assert made.finished.reason == FinishReason.FINISH_REASON_LENGTH


def test_the_end_of_a_structure_wins_over_min_tokens_and_a_stop_ends_before(stub: GenerationServiceStub) -> None:
    made = once(stub, Structure(choice=Choice(texts=["a"])), stopping=StoppingOptions(max_tokens=50, min_tokens=50))
    assert (made.finished.reason, made.text) == (END, "a")
    made = once(stub, Structure(regex="ab{9}"), stopping=StoppingOptions(max_tokens=50, stop=["bb"]))
    assert (made.finished.reason, made.text) == (FinishReason.FINISH_REASON_STOP, "a")
    made = once(stub, Structure(regex="(0123456789){30}"), stopping=StoppingOptions(max_tokens=3))
    assert made.finished.reason == FinishReason.FINISH_REASON_LENGTH and "0123456789" * 30 > made.text > ""


def test_where_nothing_is_left_that_request_alone_ends(stub: GenerationServiceStub) -> None:
    alone = plain(stub)
    tokens = [token.id for token in once(stub, Structure(choice=Choice(texts=["q"]))).tokens]
    sampling = SamplingOptions(allowed_token_ids=tokens[:1])
    beside = stub.GenerateOnce.future(PLAIN, timeout=TIMEOUT_S)
    error = failure(lambda: once(stub, Structure(choice=Choice(texts=["z"])), sampling=sampling))
    assert (code(error), reason(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "NOTHING_LEFT")
    assert [token.id for token in beside.result().tokens] == alone


def test_the_command_line_has_a_structure_too(
    service: LocalService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["generate", "x", "--url", service.url, "--choice", "left", "--choice", "right"]) == 0
    assert capsys.readouterr().out.strip() in ("left", "right")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON), encoding="utf-8")
    assert cli.main(["generate", "x", "--url", service.url, "--json-schema", str(schema), "--max-tokens", "600"]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), PERSON, jsonschema.Draft202012Validator)


def test_broken_structures_are_refused_and_a_stream_beside_them_keeps_its_tokens(
    service: LocalService, stub: GenerationServiceStub
) -> None:
    assert len(BROKEN) >= 60
    alone, beside, all_said = plain(stub), list[list[int]](), threading.Event()
    at_most_s, took_s = FrontEndSettings().structure_compile_s + MARGIN_S, list[float]()

    def ask_again_and_again() -> None:
        while not all_said.is_set():
            begun = time.monotonic()
            beside.append(plain(stub))
            took_s.append(time.monotonic() - begun)

    canary = threading.Thread(target=ask_again_and_again)
    canary.start()
    try:
        for name, (structure, path) in BROKEN.items():
            begun = time.monotonic()
            error = failure(lambda structure=structure: once(stub, structure))  # type: ignore[misc]
            assert time.monotonic() - begun < at_most_s, name
            expected = grpc.StatusCode.INVALID_ARGUMENT if path else grpc.StatusCode.RESOURCE_EXHAUSTED
            assert code(error) == expected, (name, error)
            assert not path or [field for field in fields(error) if field.startswith(path)], (name, fields(error))
    finally:
        all_said.set()
        canary.join()
    assert beside and all(tokens == alone for tokens in beside)
    assert max(took_s) < MARGIN_S, "a completion beside them stood still"
    assert once(stub, Structure(choice=Choice(texts=["q"]))).text == "q"
    assert len(running(service, COMPILE_MODULE)) == 1
    assert stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end.structures_compiled >= 30


def test_a_mask_worker_that_dies_ends_structured_requests_alone_once_and_is_started_again(
    service: LocalService, stub: GenerationServiceStub
) -> None:
    alone = plain(stub)
    structure = Structure(regex="(0123456789){200}")
    call = stub.Generate(
        GenerateRequest(text="def f(", structure=structure, stopping=StoppingOptions(max_tokens=1000)),
        timeout=TIMEOUT_S,
    )
    assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    beside = stub.GenerateOnce.future(PLAIN, timeout=TIMEOUT_S)
    (worker,) = running(service, WORKER_MODULE)
    os.kill(worker, signal.SIGKILL)
    error = failure(lambda: list(call))
    assert (code(error), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "STRUCTURE_LOST")
    assert [token.id for token in beside.result().tokens] == alone
    assert once(stub, Structure(choice=Choice(texts=["again"]))).text == "again"
    assert running(service, WORKER_MODULE) != [worker]
    masks = stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.masks
    assert masks.restarts == 1 and masks.written > 2 and masks.written_s > 0
    assert masks.grammars_compiled >= 2 and masks.grammars_compiled_s > 0 and masks.orders_waiting >= 0
