"""Chats in requests, over the wire: prompts, refusals, limits, and a chat that ends before it is rendered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, normalizers

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.limits import LIMITS
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.call_tables import Resource
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    Chat,
    ChatMessage,
    GenerateOnceRequest,
    GenerateRequest,
    GetModelInfoRequest,
    RenderChatRequest,
    SamplingOptions,
    StoppingOptions,
)
from runahead.v1 import FinishReason as Reason
from tests.service.calls.test_access import reason as reason_of
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, failure, fields, words
from tests.service.running_service import Service
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer

TEMPLATE: Final = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
USER: Final = ChatMessage(role="user", content="hé")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """Of a model that names no end of a sequence: its chats end where the template ends them."""
    path = tmp_path / "engine.sock"
    welcome = m.Welcome(m.PROTOCOL_VERSION, "server", msgspec.structs.replace(INFO, eos_token_ids=()))
    settings = FrontEndSettings(max_tokenizing_bytes=20_000)
    with Service(FakeEngine(path, welcome), path, chat_template=TEMPLATE, settings=settings) as running:
        yield running


def chat(*messages: ChatMessage, **values: Any) -> Chat:
    return Chat(messages=messages or (USER,), **values)


def prompt_of(submit: m.Submit) -> list[int]:
    return np.frombuffer(submit.prompt, "<i4").tolist()


def held(service: Service, resource: Resource) -> int:
    return int(service.front_end.servicer._board.held.in_all()[resource])


def test_a_chat_is_continued_from_the_prompt_that_render_chat_shows(service: Service) -> None:
    shown = service.stub.RenderChat(RenderChatRequest(chat=chat()), timeout=TIMEOUT_S)
    assert shown.text == "u:hé<|end|>a:" and END_ID in shown.token_ids
    call = service.stub.Generate(GenerateRequest(chat=chat()), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.announced and prompt_of(submit) == list(shown.token_ids)
    service.engine.output(submit.handle, [1], FinishReason.LENGTH)
    events = [event.WhichOneof("event") for event in call]
    assert (events[0], events[-1]) == ("accepted", "finished")
    once = service.stub.GenerateOnce.future(GenerateOnceRequest(chat=chat()), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert prompt_of(submit) == list(shown.token_ids)
    service.engine.output(submit.handle, [1], FinishReason.LENGTH)
    assert once.result().finished.usage.prompt_tokens == len(shown.token_ids)
    assert not service.front_end.servicer._board.held.in_all().any(), "all that it held is given back"


@pytest.mark.parametrize(
    ("stopping", "ids", "reason"),
    [
        ({}, (END_ID,), Reason.FINISH_REASON_END_OF_SEQUENCE),
        ({"stop_token_ids": [7, END_ID]}, (7, END_ID), Reason.FINISH_REASON_STOP),
        ({"ignore_eos": True}, (), None),
    ],
    ids=["by itself", "where the caller says so", "not at all"],
)
def test_an_answer_ends_at_the_token_that_the_template_writes_behind_one(
    service: Service, stopping: dict[str, Any], ids: tuple[int, ...], reason: int | None
) -> None:
    request = GenerateRequest(chat=chat(), stopping=StoppingOptions(**stopping))
    call = service.stub.Generate(request, timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    assert submit.stopping.stop_token_ids == ids
    stop = END_ID if ids else -1
    service.engine.output(
        submit.handle, [1, END_ID], FinishReason.STOP if ids else FinishReason.LENGTH, stop_token_id=stop
    )
    finished = list(call)[-1].finished
    assert finished.reason == (Reason.FINISH_REASON_LENGTH if reason is None else reason)
    assert (finished.stop.token_id == END_ID) == bool(ids)


def test_an_answer_that_may_only_end_is_refused_where_min_tokens_forbids_its_end(service: Service) -> None:
    def asked(*allowed: int, **stopping: Any) -> GenerateRequest:
        options = StoppingOptions(min_tokens=2, max_tokens=4, **stopping)
        return GenerateRequest(chat=chat(), sampling=SamplingOptions(allowed_token_ids=allowed), stopping=options)

    error = failure(lambda: list(service.stub.Generate(asked(END_ID), timeout=TIMEOUT_S)))
    assert fields(error) == ["sampling.allowed_token_ids"]
    for request in (asked(END_ID, 7), asked(END_ID, ignore_eos=True)):
        call = service.stub.Generate(request, timeout=TIMEOUT_S)
        service.engine.output(service.engine.next_submit().handle, [7], FinishReason.LENGTH)
        assert list(call)[-1].finished.reason == Reason.FINISH_REASON_LENGTH


def test_the_model_s_info_says_that_chats_are_served_and_what_ends_one(service: Service) -> None:
    info = service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert info.chat and list(info.chat_end_token_ids) == [END_ID] and info.chat_template == TEMPLATE


REFUSED: Final[dict[str, tuple[GenerateRequest, list[str]]]] = {
    "no message": (GenerateRequest(chat=Chat()), ["chat.messages"]),
    "too many": (GenerateRequest(chat=chat(*[USER] * 1025)), ["chat.messages"]),
    "nobody who speaks": (
        GenerateRequest(chat=chat(USER, ChatMessage(content="a"), ChatMessage())),
        ["chat.messages[1].role", "chat.messages[2].role"],
    ),
    "special tokens": (GenerateRequest(chat=chat(), add_special_tokens=False), ["add_special_tokens"]),
    "two ways to end": (
        GenerateRequest(chat=chat(continue_last=True, add_generation_prompt=True)),
        ["chat.add_generation_prompt"],
    ),
    "empty texts": (
        GenerateRequest(chat=chat(tools_json="", options_json="", template_name="")),
        ["chat.tools_json", "chat.options_json", "chat.template_name"],
    ),
    "tools": (GenerateRequest(chat=chat(tools_json="no")), ["chat.tools_json"]),
    "a long prompt": (GenerateRequest(chat=chat(ChatMessage(role="user", content="x" * 64))), ["chat"]),
    "too large": (GenerateRequest(chat=chat(ChatMessage(role="u", content="x" * LIMITS.prompt_text_bytes))), ["chat"]),
}


JOINED: Final = "{% for m in messages %}<|{{ m.content }}|>{{ m.role }}:{{ m.name }}<|end|>{% endfor %}"
STRICT: Final = {"refuse_special_tokens": True}


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (ChatMessage(role="user", content="end"), "chat.refuse_special_tokens"),
        (ChatMessage(role="user", content="no", name="＜｜ｅｎｄ｜＞"), "chat.refuse_special_tokens"),
        (ChatMessage(role="end", content="no"), "chat.messages[0].role"),
    ],
    ids=["by the template", "by the normalizer", "a role that is a part of one"],
)
def test_texts_that_make_a_special_token_are_refused_by_who_asks_for_it(
    tmp_path: Path, message: ChatMessage, path: str
) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    socket = tmp_path / "engine.sock"
    with Service(FakeEngine(socket), socket, tokenizer=tokenizer, chat_template=JOINED) as service:
        stub = service.stub
        for call in (
            lambda strict: stub.RenderChat(RenderChatRequest(chat=chat(message, **strict)), timeout=TIMEOUT_S),
            lambda strict: stub.GenerateOnce(GenerateOnceRequest(chat=chat(message, **strict)), timeout=TIMEOUT_S),
        ):
            assert fields(failure(lambda call=call: call(STRICT))) == [path]  # type: ignore[misc]
        loose = stub.RenderChat(RenderChatRequest(chat=chat(message)), timeout=TIMEOUT_S)
        assert END_ID in loose.token_ids
        fine = ChatMessage(role="user", content="Ａ <|en d|> \U0001f600", name="end")
        shown = stub.RenderChat(RenderChatRequest(chat=chat(fine, **STRICT)), timeout=TIMEOUT_S)
        assert list(shown.token_ids).count(END_ID) == 1


@pytest.mark.parametrize(("request_", "paths"), REFUSED.values(), ids=list(REFUSED))
def test_a_chat_that_is_wrong_is_refused_by_its_path(
    service: Service, request_: GenerateRequest, paths: list[str]
) -> None:
    error = failure(lambda: list(service.stub.Generate(request_, timeout=TIMEOUT_S)))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, paths)
    assert service.engine.submitted.empty()


def test_what_a_template_says_is_told_and_not_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.sock"
    template = "{{ raise_exception('SECRET ' + messages[0].content) }}"
    with Service(FakeEngine(path), path, chat_template=template) as running:
        error = failure(lambda: running.stub.RenderChat(RenderChatRequest(chat=chat()), timeout=TIMEOUT_S))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["chat.messages"])
    assert words(error) == "chat.messages are refused by the chat template: SECRET hé"
    out, err = capfd.readouterr()
    assert "SECRET" not in out + err


def test_a_server_without_a_template_says_so_and_reads_no_message(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, chat_template="") as running:
        for call in (
            lambda: list(running.stub.Generate(GenerateRequest(chat=chat()), timeout=TIMEOUT_S)),
            lambda: running.stub.RenderChat(RenderChatRequest(chat=chat()), timeout=TIMEOUT_S),
        ):
            error = failure(call)
            assert (code(error), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")
        info = running.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        assert not info.chat and not info.chat_end_token_ids


class Gate:
    """Holds chats up before they are rendered."""

    def __init__(self, service: Service, patch: pytest.MonkeyPatch) -> None:
        self._open = asyncio.Event()
        self._service = service
        chats = service.front_end.servicer._chats
        render = chats.text

        async def late(*arguments: Any) -> str:
            await self._open.wait()
            return await render(*arguments)

        patch.setattr(chats, "text", late)

    def open(self) -> None:
        self._service.call(self._open.set)


def test_an_abort_ends_a_request_whose_chat_waits_to_be_rendered(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gate(service, monkeypatch)
    call = service.stub.Generate(GenerateRequest(chat=chat(), request_id="r"), timeout=TIMEOUT_S)
    assert service.engine.announced.get(timeout=TIMEOUT_S).request_id == "r"
    (result,) = service.stub.Abort(AbortRequest(request_ids=["r"]), timeout=TIMEOUT_S).results
    assert result.outcome == AbortOutcome.ABORT_OUTCOME_ABORTED
    accepted, finished = list(call)
    assert accepted.accepted.request_id == "r" and finished.finished.reason == Reason.FINISH_REASON_ABORTED
    assert service.engine.next_cancel() and service.engine.submitted.empty()


def test_a_chat_counts_as_work_before_it_is_rendered_and_what_is_rendered_behind_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(service, monkeypatch)
    request = GenerateRequest(chat=chat(), request_id="r")
    call = service.stub.Generate(request, timeout=TIMEOUT_S)
    service.engine.announced.get(timeout=TIMEOUT_S)
    size = request.chat.ByteSize()
    assert (held(service, Resource.TOKENIZING_BYTES), held(service, Resource.QUEUED_TOKENS)) == (size, size)
    gate.open()
    submit = service.engine.next_submit()
    next(call)
    assert held(service, Resource.TOKENIZING_BYTES) == 0
    assert held(service, Resource.QUEUED_TOKENS) == len(prompt_of(submit))
    call.cancel()


def test_a_rendered_text_that_there_is_no_room_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    settings = FrontEndSettings(max_tokenizing_bytes=20_000)
    with Service(FakeEngine(path), path, chat_template="{{ 'x' * 30000 }}", settings=settings) as running:
        error = failure(lambda: running.stub.RenderChat(RenderChatRequest(chat=chat()), timeout=TIMEOUT_S))
        assert (code(error), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOKENIZING_LIMIT")
        call = running.stub.Generate(GenerateRequest(chat=chat()), timeout=TIMEOUT_S)
        assert (code(failure(lambda: list(call))), running.engine.submitted.empty()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            True,
        )
        assert not running.front_end.servicer._board.held.in_all().any()
