"""Validates a request's chat as far as that takes no time.

A confined process checks its JSON and its template: see `runahead.service.chat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runahead.service.contract.limits import LIMITS
from runahead.service.contract.violations import Violations
from runahead.v1 import Chat


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
