"""Requests with a structure: compiled beside the event loop, once, by turns; refused by the place that is wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.inputs import StructureSource
from runahead.service.contract.limits import LIMITS
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import FrontEndCounters
from runahead.service.structures import structures as module
from runahead.service.structures.compile_messages import Answer
from runahead.service.structures.structures import Structures, why_none
from runahead.v1 import (
    AbortRequest,
    Choice,
    GenerateOnceRequest,
    GenerateRequest,
    GetModelInfoRequest,
    StatsRequest,
    Structure,
    TokenIds,
)
from runahead.v1 import FinishReason as Reason
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure, fields, words
from tests.service.running_service import Service

# The bundled model's tokens: the compile process reads them from its checkpoint.
FOLLOWS = msgspec.structs.replace(INFO, vocab_size=4096, eos_token_ids=(0,), structures=True)
SPACED = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}", "json_allowed_escapes": 'nrbtf\\"'}}
LONG_S = 60.0  # a compile process is started


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("engine") / "engine.sock"
    welcome = m.Welcome(m.PROTOCOL_VERSION, "server-1", FOLLOWS)
    with Service(FakeEngine(path, welcome), path) as running:
        yield running


def request(**kind: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=[1]), structure=Structure(**kind))


def reason(error: grpc.RpcError) -> str:
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


def front_end_stats(service: Service) -> Any:
    return service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end


def submitted(service: Service, asked: GenerateRequest) -> m.Submit:
    """What the engine gets of a request, which then ends."""
    call = service.stub.Generate(asked, timeout=LONG_S)
    submit = service.engine.submitted.get(timeout=LONG_S)
    service.engine.output(submit.handle, [1], FinishReason.END_OF_SEQUENCE, 1)
    assert list(call)[-1].finished.reason == Reason.FINISH_REASON_END_OF_SEQUENCE
    return submit


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ({"json_schema": '{"title":"T", "type": "string"}'}, {"json_schema": {**SPACED, "type": "string"}}),
        ({"json_schema": "true"}, {"json_schema": SPACED}),
        ({"json_object": True}, {"json_schema": {**SPACED, "type": "object"}}),
        ({"choice": Choice(texts=["a", "b", "a"])}, {"lark_grammar": 'start: "a" | "b"'}),
        ({"grammar": 'start: "x"'}, {"lark_grammar": 'start: "x"'}),
        ({"ebnf": 'root ::= "x"'}, {"lark_grammar": 'start: "x"'}),
    ],
)
def test_the_engine_gets_the_grammar_of_a_structure(service: Service, kind: dict[str, Any], grammar: object) -> None:
    assert json.loads(submitted(service, request(**kind)).structure) == {"grammars": [grammar]}


def test_a_request_without_a_structure_has_no_grammar(service: Service) -> None:
    assert submitted(service, GenerateRequest(token_ids=TokenIds(ids=[1]))).structure == ""


def test_a_structure_is_compiled_once_whatever_becomes_of_it(service: Service) -> None:
    good, bad = request(regex="once[0-9]"), request(regex="once(")
    before = front_end_stats(service)
    for _ in range(3):
        submitted(service, good)
        assert code(failure(lambda: service.stub.GenerateOnce(once(bad), timeout=LONG_S))) == INVALID
    after = front_end_stats(service)
    assert after.structures_compiled - before.structures_compiled == 2
    assert after.structure_hits - before.structure_hits == 4
    assert after.structure_compile_us > before.structure_compile_us
    assert after.waiting_structures == 0


INVALID = grpc.StatusCode.INVALID_ARGUMENT


def once(asked: GenerateRequest) -> GenerateOnceRequest:
    return GenerateOnceRequest.FromString(asked.SerializeToString())


@pytest.mark.parametrize(
    ("kind", "field", "sentence"),
    [
        (
            {"json_schema": '{"items": {"not": {}}}'},
            "structure.json_schema#/items/not",
            "structure.json_schema#/items/not is a keyword that is not enforced",
        ),
        ({"json_schema": "[]"}, "structure.json_schema", "structure.json_schema must be an object, or true"),
        ({"regex": "("}, "structure.regex", "structure.regex can't be compiled"),
        ({"grammar": "start: a\na: @b"}, "structure.grammar", "(line 2)"),
        ({"ebnf": "root ::= a\na = b"}, "structure.ebnf", "(line 2)"),
    ],
)
def test_a_structure_that_is_wrong_is_refused_by_its_place_and_never_reaches_the_engine(
    service: Service, kind: dict[str, Any], field: str, sentence: str
) -> None:
    error = failure(lambda: list(service.stub.Generate(request(**kind), timeout=LONG_S)))
    assert (code(error), reason(error), fields(error)) == (INVALID, "INVALID_FIELD", [field])
    assert sentence in words(error)
    assert service.engine.submitted.empty()
    error = failure(lambda: service.stub.GenerateOnce(once(request(**kind)), timeout=LONG_S))
    assert fields(error) == [field]


def test_while_a_structure_waits_its_request_can_be_aborted_and_the_others_go_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    structures = service.front_end.servicer._structures
    began, may_end = threading.Event(), threading.Event()
    compile_ = structures._compiler.compile

    async def slow(source: Any) -> Any:
        began.set()
        await asyncio.to_thread(may_end.wait, LONG_S)
        return await compile_(source)

    monkeypatch.setattr(structures._compiler, "compile", slow)
    asked = request(regex="slow")
    asked.request_id = "slow"
    call = service.stub.Generate(asked, timeout=LONG_S)
    assert began.wait(TIMEOUT_S)
    announced = iter(lambda: service.engine.announced.get(timeout=TIMEOUT_S).request_id, "slow")
    assert "slow" not in list(announced), "and then it has come"
    behind = service.stub.Generate(request(regex="behind"), timeout=LONG_S)
    submitted(service, GenerateRequest(token_ids=TokenIds(ids=[1])))  # who has none does not wait
    service.stub.Abort(AbortRequest(request_ids=["slow"]), timeout=TIMEOUT_S)
    assert list(call)[-1].finished.reason == Reason.FINISH_REASON_ABORTED
    may_end.set()
    submit = service.engine.submitted.get(timeout=LONG_S)
    assert "behind" in submit.structure
    service.engine.output(submit.handle, [1], FinishReason.END_OF_SEQUENCE, 1)
    assert list(behind)[-1].HasField("finished")


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMITS", replace(LIMITS, structure_cache_bytes=3_000))
    made = Structures(FOLLOWS, FrontEndSettings(), FrontEndCounters())
    sources = [StructureSource("regex", text * 100, "structure.regex") for text in "abc"]
    for source in sources[:2]:
        made._remember(source, Answer(grammar="g" * 100))
    assert made.is_known(sources[0]) and made._remembered(sources[0])
    made._remember(sources[2], Answer(grammar="g" * 100))
    assert [made.is_known(source) for source in sources] == [True, False, True], "the one not asked for goes"
    made._remember(StructureSource("regex", "x" * 10_000, "structure.regex"), Answer(grammar="g"))
    assert made._known_bytes == 0 and not made._known


def test_a_server_that_can_follow_none_says_why_and_what_is_wrong_besides_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path) as running:
        error = failure(lambda: list(running.stub.Generate(request(regex="a"), timeout=TIMEOUT_S)))
        assert (code(error), reason(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_STRUCTURE")
        assert words(error) == "this server takes no structure: its engine follows none on the device cpu"
        error = failure(lambda: list(running.stub.Generate(request(regex=""), timeout=TIMEOUT_S)))
        assert code(error) == INVALID
        told = running.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        assert (told.engine.structures, told.limits.structure_bytes) == (False, 0)
        assert running.engine.submitted.empty()
    monkeypatch.setattr("runahead.service.structures.structures.is_installed", lambda: False)
    assert "pip install 'runahead-server[structure]'" in why_none(FOLLOWS)


def test_a_server_that_follows_structures_says_so(service: Service) -> None:
    told = service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert (told.engine.structures, told.limits.structure_bytes) == (True, LIMITS.structure_bytes)
