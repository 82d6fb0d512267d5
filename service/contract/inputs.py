"""Validates texts, chats and structures as far as that takes no time.

Confined processes render chats and compile structures: see `runahead.service.chat` and `runahead.service.structures`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from runahead.service.contract.errors import Violations, checking
from runahead.service.contract.limits import LIMITS
from runahead.v1 import (
    Chat,
    DetokenizeRequest,
    GenerateOnceRequest,
    GenerateRequest,
    RenderChatRequest,
    TokenizeRequest,
)

Kind = Literal["json_schema", "regex", "choice", "grammar", "ebnf"]

_ANY_OBJECT: Final = '{"type":"object"}'
_BESIDE: Final = "must not be set beside structure, whose end is an end-of-sequence token"
_MISSING: Final = "is empty: set json_schema, json_object, regex, choice, grammar or ebnf"


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """A checked chat. messages: the set fields of each, by contract name."""

    messages: tuple[Mapping[str, str], ...]
    tools_json: str
    options_json: str
    add_generation_prompt: bool
    continue_last: bool
    template_name: str
    refuse_special_tokens: bool


def check_chat(chat: Chat, found: Violations) -> CheckedChat:
    """Validate a chat and record its violations."""
    most = LIMITS.prompt_text_bytes
    found.require(chat.ByteSize() <= most, "chat", f"must be at most {most} bytes")
    messages = list(chat.messages)
    if not found.require(bool(messages), "chat.messages", "must have at least one entry") or not found.require_at_most(
        LIMITS.chat_messages, len(messages), "chat.messages"
    ):
        messages = []
    wrong = [index for index, message in enumerate(messages) if not message.role]
    found.require_none("chat.messages", wrong, lambda index: (f"chat.messages[{index}].role", "must not be empty"))
    for name in ("tools_json", "options_json", "template_name"):
        found.require(not chat.HasField(name) or bool(getattr(chat, name)), f"chat.{name}", "must not be empty")
    found.require(
        not (chat.continue_last and chat.add_generation_prompt),
        "chat.add_generation_prompt",
        "must not be set beside continue_last: an answer goes on, and none begins",
    )
    if chat.HasField("add_generation_prompt"):
        begins_answer = chat.add_generation_prompt
    else:
        begins_answer = not chat.continue_last
    return CheckedChat(
        messages=tuple({field.name: value for field, value in message.ListFields()} for message in messages),
        tools_json=chat.tools_json,
        options_json=chat.options_json,
        add_generation_prompt=begins_answer,
        continue_last=chat.continue_last,
        template_name=chat.template_name,
        refuse_special_tokens=chat.refuse_special_tokens,
    )


@dataclass(frozen=True, slots=True)
class StructureSource:
    """A request's structure as text.

    text: the schema, expression or grammar, or a choice's texts as a JSON list. field: its path.
    """

    kind: Kind
    text: str
    field: str


def check_structure(request: GenerateRequest | GenerateOnceRequest, found: Violations) -> StructureSource | None:
    """Validate a request's structure and record its violations. Returns None without a valid one."""
    found.require(not request.stopping.ignore_eos, "stopping.ignore_eos", _BESIDE)
    structure = request.structure
    kind = structure.WhichOneof("kind")
    if kind is None:
        found.require(False, "structure", _MISSING)
        return None
    field = f"structure.{kind}"
    if kind == "json_object":
        found.require(structure.json_object, field, "must be true, or unset")
        return StructureSource("json_schema", _ANY_OBJECT, field)
    if kind == "choice":
        texts = list(structure.choice.texts)
        _check_choice(texts, found)
        return StructureSource(kind, json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False), field)
    text: str = getattr(structure, kind)
    found.require(bool(text), field, "must not be empty")
    _check_bytes(len(text.encode()), field, found)
    return StructureSource(kind, text, field)


def _check_choice(texts: list[str], found: Violations) -> None:
    field = "structure.choice.texts"
    if not found.require(bool(texts), field, "must have at least one entry"):
        return
    if not found.require_at_most(LIMITS.choices, len(texts), field):
        return
    sizes = [len(text.encode()) for text in texts]
    found.require_sizes(sizes, LIMITS.choice_bytes, field)
    _check_bytes(sum(sizes), field, found)


def _check_bytes(size: int, field: str, found: Violations) -> None:
    most = LIMITS.structure_bytes
    found.require(size <= most, field, f"must be at most {most} bytes of UTF-8, and has {size}")


def check_render_chat(request: RenderChatRequest) -> CheckedChat:
    """Validate RenderChat. Raises ServiceError (INVALID_ARGUMENT)."""
    with checking(request) as found:
        return check_chat(request.chat, found)


def check_tokenize(request: TokenizeRequest) -> None:
    """Validate Tokenize. Raises ServiceError (INVALID_ARGUMENT), also for a text over `Limits.prompt_text_bytes`."""
    with checking(request) as found:
        found.require_text_bytes(request.text)


def check_detokenize(request: DetokenizeRequest, vocab_size: int) -> None:
    """Validate Detokenize. Raises ServiceError (INVALID_ARGUMENT), also for too many ids or an id out of range."""
    with checking(request) as found:
        found.require_ids(request.token_ids, LIMITS.detokenize_ids, vocab_size, "token_ids")
