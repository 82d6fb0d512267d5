"""The special tokens that a tokenizer puts around a prompt: it does unless it is told not to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.v1 import GenerateOnceRequest, GenerateRequest, TokenizeRequest
from tests.service import running_service
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.running_service import Service
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer

SHORT, LONG = "hello", "hello " * 2_000  # the one is tokenized at once, the other takes turns


def dressing_tokenizer() -> Tokenizer:
    """Puts a token before each text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", END_ID)])
    return tokenizer


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(running_service, "byte_level_tokenizer", dressing_tokenizer)
    path = tmp_path / "engine.sock"
    info = msgspec.structs.replace(INFO, context_length=50_000)
    with Service(FakeEngine(path, m.Welcome(m.PROTOCOL_VERSION, "server-1", info)), path) as running:
        yield running


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("chosen", [{}, {"add_special_tokens": True}, {"add_special_tokens": False}], ids=str)
@pytest.mark.parametrize("once", [False, True])
def test_they_are_added_unless_the_request_says_otherwise(
    service: Service, once: bool, chosen: dict[str, Any], text: str
) -> None:
    if once:
        call = service.stub.GenerateOnce.future(GenerateOnceRequest(text=text, **chosen), timeout=TIMEOUT_S)
    else:
        call = service.stub.Generate(GenerateRequest(text=text, **chosen), timeout=TIMEOUT_S)
    submit = service.engine.next_submit()
    bare = byte_level_tokenizer().encode(text).ids
    right = [END_ID, *bare] if chosen.get("add_special_tokens", True) else bare
    assert np.frombuffer(submit.prompt, "<i4").tolist() == right
    tokenized = service.stub.Tokenize(TokenizeRequest(text=text, **chosen), timeout=TIMEOUT_S)
    assert list(tokenized.token_ids) == right, "as Tokenize says"
    service.engine.output(submit.handle, [1], FinishReason.LENGTH)
    accepted = call.result().accepted if once else next(call).accepted
    assert accepted.prompt_tokens == len(right)
