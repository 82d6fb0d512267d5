"""A compile process: what it makes of structures, and what ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from grpc import StatusCode

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.inputs import Kind, StructureSource
from runahead.service.structures import structures
from runahead.service.structures.compile_messages import Answer, Vocabulary
from runahead.service.structures.structures import Compiler

TIMEOUT_S = 60.0
# Of which the library makes so much that it takes seconds, and far more than 64 MiB.
LARGE = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4000)}}


def vocabulary(**changes: Any) -> Vocabulary:
    bounds = {"compile_s": 20.0, "memory_mb": 512, **changes}
    return Vocabulary(**{"model": str(BUNDLED_FOLDER), "vocab_size": 4096, "eos_token_ids": (0,), **bounds})


def with_compiler(body: Callable[[Compiler], Awaitable[None]], **changes: Any) -> None:
    async def started() -> None:
        made = Compiler(vocabulary(**changes))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await body(made)
        finally:
            await made.close()

    asyncio.run(started())


def source(text: object, kind: Kind = "json_schema") -> StructureSource:
    return StructureSource(kind, text if isinstance(text, str) else json.dumps(text), f"structure.{kind}")


def pid_of(made: Compiler) -> int:
    assert made.worker.process is not None
    return made.worker.process.pid


GOOD: dict[str, tuple[Kind, object]] = {
    "a schema": ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    "an expression": ("regex", r"a|\d{3}/"),
    "a choice": ("choice", ["yes", 'n"o', "\x7f\n", "日本"]),
    "a grammar": ("grammar", 'start: "a" start | "b"'),
    "a grammar in EBNF": ("ebnf", 'root ::= "a" root | "b"'),
}

WRONG: dict[str, tuple[Kind, object, str, str]] = {
    "a keyword": ("json_schema", {"properties": {"a": {"not": {}}}}, "#/properties/a/not", "not enforced"),
    "an expression in a schema": (
        "json_schema",
        {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(a)\\1"}]}}},
        "#/properties/a/anyOf/1",
        "backreferences are not supported",
    ),
    "a fault that shows in a definition": (
        "json_schema",
        {"$defs": {"x": {"type": "string", "minLength": 5, "maxLength": 2}}, "$ref": "#/$defs/x"},
        "#/$defs/x",
        "minLength",
    ),
    "a reference to nowhere": ("json_schema", {"items": {"$ref": "#/nope"}}, "#/items", "does not exist"),
    "a schema that leads to itself": ("json_schema", {"$ref": "#"}, "#", "has nothing that matches"),
    "a schema of nothing": ("json_schema", "false", "", "can't be compiled"),
    "a type that is none": ("json_schema", {"type": "text"}, "#", "Invalid type"),
    "an unclosed group": ("regex", "(", "", "unclosed group"),
    "look-around": ("regex", "(?=a)b", "", "look-around"),
    "an expression of nothing": ("regex", r"[^\x00-\x{10FFFF}]", "", "has nothing that matches"),
    "a rule that is not there": ("grammar", "start: nowhere", "", "unknown name"),
    "a rule that leads to itself": ("grammar", "start: start", "", "has nothing that matches"),
    "a directive": ("grammar", 'start: a\na: %json {"not": {}}', "line 2", "directive"),
    "a rule of EBNF that is not there": ("ebnf", "root ::= nowhere", "", "not found"),
    "a rule of EBNF that leads to itself": ("ebnf", "root ::= root", "", "has nothing that matches"),
    "too many ways": (
        "grammar",
        "start: " + " ".join(f'"{chr(97 + n % 26)}"?' for n in range(3000)),
        "",
        "costs too much",
    ),
}


def test_of_structures_it_makes_grammars_and_of_wrong_ones_says_what_is_wrong_and_where() -> None:
    async def body(made: Compiler) -> None:
        pids = set()
        for kind, text in GOOD.values():
            answer = await made.compile(source(text, kind))
            assert answer.sentence == "" and "grammars" in json.loads(answer.grammar), text
            pids.add(pid_of(made))
        for name, (kind, text, place, words) in WRONG.items():
            answer = await made.compile(source(text, kind))
            assert words in answer.sentence and answer.location == place, (name, answer)
            assert not answer.grammar
            pids.add(pid_of(made))
        assert len(pids) == 1, "nothing of it ended the process"

    with_compiler(body)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"compile_s": 0.05}, "takes more than 0.05 s of processor time"),
        ({"memory_mb": 8}, "needs more than 8 MiB of memory"),
    ],
)
def test_a_structure_that_takes_more_than_one_may_ends_the_process_and_is_refused_and_the_next_is_compiled(
    bounds: dict[str, Any], words: str
) -> None:
    async def body(made: Compiler) -> None:
        assert (await made.compile(source({}))).grammar
        before = pid_of(made)
        answer = await made.compile(source(LARGE))
        assert words in answer.sentence and not answer.grammar
        assert (await made.compile(source({}))).grammar
        assert pid_of(made) != before

    with_compiler(body, **bounds)


def test_a_process_that_was_killed_is_nobodys_fault_and_another_is_started() -> None:
    async def body(made: Compiler) -> None:
        await made.compile(source({}))
        os.kill(pid_of(made), signal.SIGKILL)
        with pytest.raises(ServiceError) as lost:
            await made.compile(source({}))
        assert (lost.value.reason, lost.value.code) == ("STRUCTURE_LOST", StatusCode.UNAVAILABLE)
        assert (await made.compile(source({}))).grammar

    with_compiler(body)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGPROF])
def test_a_process_that_ended_while_it_was_asked_for_nothing_is_missed_by_no_structure(number: signal.Signals) -> None:
    async def body(made: Compiler) -> None:
        await made.compile(source({}))
        process = made.worker.process
        assert process is not None
        process.send_signal(number)
        await process.wait()
        assert (await made.compile(source({}))).grammar
        assert made.worker.process is not process

    with_compiler(body)


def test_a_process_that_is_stopped_is_ended_in_time_and_another_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "_WALL", 0.01)

    async def body(made: Compiler) -> None:
        await made.worker.started()
        before = pid_of(made)
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(ServiceError, match="not compiled in time"):
            await made.compile(source({}))
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        monkeypatch.setattr(structures, "_WALL", 20)
        assert (await made.compile(source({}))).grammar

    with_compiler(body)


def test_tokens_in_which_no_grammar_is_followed_are_told_and_not_tried_again() -> None:
    async def body(made: Compiler) -> None:
        for _ in range(2):
            with pytest.raises(ServiceError, match="no end-of-sequence token") as refused:
                await made.compile(source({}))
            assert refused.value.reason == "NO_STRUCTURE"
            assert made.worker.process is None

    with_compiler(body, eos_token_ids=())


def test_a_process_that_does_not_start_is_told_of_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(made: Compiler) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(made.worker, "command", ("false",))
            with pytest.raises(ServiceError, match="can't be started"):
                await made.compile(source({}))
        assert (await made.compile(source({}))).grammar

    with_compiler(body)


def test_what_was_closed_starts_nothing_any_more() -> None:
    async def body(made: Compiler) -> None:
        await made.compile(source({}))
        pid = pid_of(made)
        await made.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(ServiceError, match="shutting down"):
            await made.compile(source({}))

    with_compiler(body)


def test_an_answer_that_is_the_processes_last_is_taken_and_another_process_answers_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = 'read a; echo \'{}\'; read b; echo \'{"grammar":"G","is_last":true}\''

    async def body(made: Compiler) -> None:
        monkeypatch.setattr(made.worker, "command", ("sh", "-c", script))
        for _ in range(2):
            assert await made.compile(source({})) == Answer(grammar="G", is_last=True)
            assert made.worker.process is None

    with_compiler(body)
