"""Texts on their way to tokens, in a running service: bounded, in turns, and for as long as somebody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from runahead.service.calls.admission import Access, Admission
from runahead.service.chat.chats import Chats
from runahead.service.completion.preparing import Texts
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.shared_memory.call_tables import Resource
from runahead.service.text import text_cuts
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import DetokenizeRequest, GenerateOnceRequest, GenerateRequest, TokenizeRequest
from tests.service.calls.test_access import ALICE, BOB, bearer, secured
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, failure, fields
from tests.service.running_service import Service
from tests.service.small_tokenizers import byte_level_tokenizer

PIECE = 100  # characters
LONG_TEXT = "word " * 2000  # of 100 pieces


class Gate:
    """Lets the tokenizer's threads through, piece by piece. begun: the first word of each piece, in order."""

    def __init__(self, service: Service, patch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.threads = threading.Semaphore(0)
        self._is_open = False
        texts: Any = service.front_end.servicer._texts
        self._tokenizer = texts._tokenizer
        self._encode = self._tokenizer._encode
        patch.setattr(self._tokenizer, "_encode", self._late)

    def _late(self, text: str, add_special_tokens: bool) -> Any:
        self.begun.append(text.split()[0])
        if not self._is_open:
            self.threads.acquire(timeout=TIMEOUT_S)
        return self._encode(text, add_special_tokens)

    def until(self, condition: Callable[[], bool]) -> None:
        timer = threading.Timer(TIMEOUT_S, lambda: None)
        timer.start()
        while not condition():
            assert timer.is_alive(), self.begun
        timer.cancel()

    @property
    def waiting(self) -> int:
        try:
            return int(self._tokenizer.waiting)
        except RuntimeError:  # it was changed at that moment, on its own thread
            return -1

    def open(self) -> None:
        self._is_open = True
        self.threads.release(10)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """With callers, a context for long texts, and small pieces."""
    monkeypatch.setattr(text_cuts, "PIECE", PIECE)
    monkeypatch.setattr("runahead.service.text.tokenizer._INLINE_CHARACTERS", PIECE)
    with secured(tmp_path, info=msgspec.structs.replace(INFO, context_length=100_000)) as running:
        yield running


@pytest.fixture
def gate(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(service, monkeypatch)
    yield gate
    gate.open()


def tokenizing_bytes(service: Service) -> int:
    return int(service.front_end.servicer._board.held.in_all()[Resource.TOKENIZING_BYTES])


def generate(service: Service, text: str, token: str, timeout_s: float = TIMEOUT_S) -> Any:
    return service.stub.Generate(GenerateRequest(text=text), timeout=timeout_s, metadata=bearer(token))


def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path) as service:
        gate = Gate(service, monkeypatch)
        error = failure(lambda: list(service.stub.Generate(GenerateRequest(text="x" * 500), timeout=TIMEOUT_S)))
        assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["text"])
        assert "text has 500 bytes, which are at least 72 tokens" in str(error.details())
        once = GenerateOnceRequest(text="x" * 500)
        assert fields(failure(lambda: service.stub.GenerateOnce(once, timeout=TIMEOUT_S))) == ["text"]
        assert gate.begun == []


@pytest.mark.parametrize("how", ["cancelled", "late", "disconnected"])
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_the_work_for_a_text_ends_with_its_call(service: Service, gate: Gate, method: str, how: str) -> None:
    channel = service.connect()
    stub: Any = type(service.stub)(channel)
    timeout_s = 0.5 if how == "late" else TIMEOUT_S
    calls = []
    for text in (LONG_TEXT, LONG_TEXT, LONG_TEXT):
        if method == "Generate":
            calls.append(stub.Generate(GenerateRequest(text=text), timeout=timeout_s, metadata=bearer(ALICE)))
        else:
            calls.append(stub.Tokenize.future(TokenizeRequest(text=text), timeout=timeout_s, metadata=bearer(ALICE)))
    gate.until(lambda: len(gate.begun) == 2 and gate.waiting == 1)
    if how == "cancelled":
        for call in calls:
            call.cancel()
    elif how == "disconnected":
        channel.close()
    gate.until(lambda: gate.waiting == 0 and tokenizing_bytes(service) == 0)
    gate.open()
    assert service.stub.Tokenize(TokenizeRequest(text="other " * 30), timeout=TIMEOUT_S, metadata=bearer(BOB)).token_ids
    assert gate.begun == ["word", "word", "other", "other"], "a piece that has begun is the last of its text"
    assert service.engine.submitted.empty()
    channel.close()


def test_a_caller_with_much_text_takes_turns_with_another(service: Service, gate: Gate) -> None:
    alice = [generate(service, LONG_TEXT, ALICE) for _ in range(5)]
    gate.until(lambda: len(gate.begun) == 2 and gate.waiting == 3)
    bob = generate(service, "bob " * 60, BOB)  # three pieces
    gate.until(lambda: gate.waiting == 4)
    gate.threads.release(8)
    gate.until(lambda: gate.begun.count("bob") == 3)

    def is_bobs_done() -> bool:
        return tokenizing_bytes(service) == 5 * len(LONG_TEXT)

    while not is_bobs_done():  # either thread may be the next to go on
        begun = len(gate.begun)
        gate.threads.release(1)
        gate.until(lambda begun=begun: is_bobs_done() or len(gate.begun) > begun)  # type: ignore[misc]
    assert len(gate.begun) <= 30, "of 503 pieces"
    assert next(bob).accepted.prompt_tokens == 60 * 4
    for call in alice:
        call.cancel()


def test_ids_that_become_text_take_turns_too(service: Service, gate: Gate) -> None:
    busy = [generate(service, LONG_TEXT, ALICE) for _ in range(2)]
    gate.until(lambda: len(gate.begun) == 2)
    long = DetokenizeRequest(token_ids=[65] * 5000)
    call = service.stub.Detokenize.future(long, timeout=TIMEOUT_S, metadata=bearer(BOB))
    gate.until(lambda: gate.waiting == 1)
    gate.open()
    assert len(call.result().text) == 5000
    for stream in busy:
        stream.cancel()


def test_a_long_answer_takes_turns_with_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids are there at once, and as many as a text of 1 MiB may have."""
    board = Board()
    admission = Admission.of(FrontEndSettings(), Access(), board, board.line(0))
    tokenizer = TextTokenizer(byte_level_tokenizer())
    ids = np.arange(1 << 20, dtype=np.int32)

    async def encoded(*_: object) -> Any:
        return ids

    async def turns_meanwhile() -> int:
        texts, turns = Texts(tokenizer, Chats(tokenizer, INFO), admission, INFO), 0
        request, account = TokenizeRequest(text="x"), admission.account_of("alice")
        filled = asyncio.ensure_future(texts.tokenize(request, account))
        while not filled.done():
            turns += 1
            await asyncio.sleep(0)
        response = await filled
        assert list(response.token_ids) == ids.tolist()
        return turns

    monkeypatch.setattr(tokenizer, "encode", encoded)
    assert asyncio.run(turns_meanwhile()) > 50
    asyncio.run(tokenizer.close())
