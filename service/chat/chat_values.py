"""Converts a chat to its template's variables: messages, tools and options as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from runahead.service.chat.template_messages import Asked

# Variables and functions that a template gets by other means, beside special tokens' names.
RESERVED: Final = frozenset(
    "messages tools add_generation_prompt continue_final_message chat_template raise_exception strftime_now namespace "
    "dict range lipsum cycler joiner self loop caller varargs kwargs true false none True False None".split()
)
_VISIBLE: Final = re.compile(r"\S")
# Roles that templates turn into special tokens, such as <|user|>.
_ROLES: Final = frozenset(
    "system developer user assistant tool function ipython model context document documents observation".split()
)


class ChatFault(Exception):
    """An invalid chat. field: the path in the chat, empty for the whole chat. sentence: the fault, appended to the
    path.
    """

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field
        self.sentence = sentence


def chat_values(asked: Asked, tokens: Mapping[str, str], special: Sequence[str]) -> dict[str, Any]:
    """Return a template's variables. tokens, special: see `Templates`. Raises ChatFault."""
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(asked.messages)]
    tools = _objects(asked.tools_json, "tools_json") if asked.tools_json else None
    options = _options(asked.options_json, tokens) if asked.options_json else {}
    if asked.refuse_special_tokens:
        for index, message in enumerate(messages):
            for name, value in message.items():
                path = f"messages[{index}].{'tool_calls_json' if name == 'tool_calls' else name}"
                _refuse_special(value, path, special)
            _refuse_part(message["role"].strip(), f"messages[{index}].role", special)
        _refuse_special(tools, "tools_json", special)
        _refuse_special(options, "options_json", special)
    if asked.letter:
        messages = [{**_spelled(message, asked.letter), "role": message["role"]} for message in messages]
        tools, options = _spelled(tools, asked.letter), _spelled(options, asked.letter)
    return {
        **tokens,
        "documents": None,
        **options,
        "messages": [_with_thinking(message) for message in messages],
        "tools": tools,
        "add_generation_prompt": asked.add_generation_prompt,
    }


def _message(given: Mapping[str, str], path: str) -> dict[str, Any]:
    message: dict[str, Any] = dict(given)
    if (calls := message.pop("tool_calls_json", None)) is not None:
        message["tool_calls"] = _objects(calls, f"{path}.tool_calls_json")
    return message


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Add the reasoning under the second name that `transformers` gives it and some templates read."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _options(text: str, tokens: Mapping[str, str]) -> dict[str, Any]:
    options = _parsed(text, "options_json")
    if not isinstance(options, dict):
        raise ChatFault("options_json", "must be an object of JSON")
    for name in options:
        if name in RESERVED or name in tokens or not name.isidentifier() or name.startswith("_"):
            raise ChatFault("options_json", f"has a variable {name[:100]!r}, which can't be set")
    documents = options.get("documents")
    if documents is not None and not _are_objects(documents):
        raise ChatFault("options_json", "has documents that are not an array of objects")
    return options


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    value = _parsed(text, field)
    if not _are_objects(value):
        raise ChatFault(field, "must be an array of objects in JSON")
    return list(value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _parsed(text: str, field: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not one of its numbers")

    read: Callable[..., Any] = json.loads
    try:
        return read(text, parse_constant=refuse)
    except ValueError as error:
        raise ChatFault(field, f"is no JSON: {error}") from None
    except RecursionError:
        raise ChatFault(field, "has too many lists and objects inside each other") from None


def _refuse_special(value: Any, field: str, special: Sequence[str]) -> None:
    for text in _texts(value):
        for content in special:
            if content in text:
                raise ChatFault(field, f"spells the special token {content!r}, and refuse_special_tokens is set")


def _refuse_part(role: str, field: str, special: Sequence[str]) -> None:
    for content in special:
        if role and role in content and role not in _ROLES:
            raise ChatFault(field, f"is a part of the special token {content!r}, and refuse_special_tokens is set")


def _spelled(value: Any, letter: str) -> Any:
    """Replace each visible character of the texts with this letter. Names that a template may look up stay."""
    if isinstance(value, str):
        return _VISIBLE.sub(letter, value)
    if isinstance(value, dict):
        named = (key if key.isidentifier() and key.isascii() else _spelled(key, letter) for key in value)
        return dict(zip(named, (_spelled(inner, letter) for inner in value.values()), strict=True))
    if isinstance(value, list):
        return [_spelled(inner, letter) for inner in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
