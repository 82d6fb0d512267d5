"""Chats of a front end in a test, and what their rendering refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import pytest
from google.rpc import error_details_pb2
from tokenizers import AddedToken

from runahead.service.chat.chats import Chats
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.inputs import CheckedChat
from runahead.service.text.tokenizer import TextTokenizer
from tests.service.chat.templates import TOKENS, USER
from tests.service.fake_engine import INFO
from tests.service.small_tokenizers import byte_level_tokenizer

TIMEOUT_S: Final = 60.0


def chat(*messages: Mapping[str, str], **fields: Any) -> CheckedChat:
    unset = dict.fromkeys(("tools_json", "options_json", "template_name"), "")
    rest = {"add_generation_prompt": True, "continue_last": False, "refuse_special_tokens": False}
    return CheckedChat(**{"messages": messages or (USER,), **unset, **rest, **fields})


def with_specials() -> Any:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "</s>", "<s>")]
    )
    return tokenizer


def with_chats(
    templates: Mapping[str, str] | str, body: Callable[[Chats], Awaitable[None]], tokens: Mapping[str, str] = TOKENS
) -> None:
    named = {"default": templates} if isinstance(templates, str) else templates
    tokenizer = TextTokenizer(with_specials(), named, tokens)

    async def run() -> None:
        chats = Chats(tokenizer, INFO)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await body(chats)
        finally:
            await chats.close()
            await tokenizer.close()

    asyncio.run(run())


async def refusal(chats: Chats, asked: CheckedChat) -> tuple[str, str, str]:
    """Reason, path of the field, and sentence."""
    with pytest.raises(ServiceError) as refused:
        await chats.text(asked, 0)
    error = refused.value
    places = [v.field for d in error.details if isinstance(d, error_details_pb2.BadRequest) for v in d.field_violations]
    return error.reason, " ".join(places), error.sentence


def pids(chats: Chats) -> list[int]:
    return [worker.process.pid for worker in chats._workers if worker.process is not None]
