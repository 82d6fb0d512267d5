"""A chat template, rendered in jinja2's sandbox as `transformers` renders it.

A template comes with a checkpoint, and is a program that somebody else has written. The sandbox keeps it from
everything but the values that it is given; what it takes of time and memory, its process has to bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_CHARACTERS: Final = 4 << 20  # of a rendered text: four times what any server takes


class RefusedByTemplate(TemplateError):
    """The template itself refuses the messages, and says why."""


class TooLong(ValueError):
    """The text that the template makes has no end, or one that is too far away."""


class _Generation(Extension):
    """`{% generation %}`, which tells a trainer where an answer stands: what is in it is rendered as anything else."""

    tags = {"generation"}  # noqa: RUF012, as the library declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


class _PublicNamespace(Namespace):
    """A namespace that holds nothing under a name of Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace can't have {name!r}")
        super().__setitem__(name, value)


def render(template: str, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str:
    """The prompt that asks for the next answer.

    messages: each with its role and content. tokens: special tokens by the names under which the template asks for
    them.

    Raises RefusedByTemplate, TooLong, and whatever a template can raise that does not make sense: TemplateError,
    MemoryError, RecursionError, or any other exception of an operation in it.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now, dict=_dict, namespace=_namespace)
    values = {**tokens, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    parts: list[str] = []
    characters = 0
    for part in environment.from_string(template).generate(values):
        parts.append(part)
        characters += len(part)
        if characters > MOST_CHARACTERS:
            raise TooLong(f"it makes more than {MOST_CHARACTERS} characters of the messages")
    return "".join(parts)


def _refuse(message: object) -> NoReturn:
    raise RefusedByTemplate(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*arguments: Any, **values: Any) -> dict[Any, Any]:
    """In place of the type, which has more to it than a template needs."""
    return dict(*arguments, **values)


def _namespace(*arguments: Any, **values: Any) -> Namespace:
    made = _PublicNamespace()
    for name, value in dict(*arguments, **values).items():
        made[name] = value
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike the library's own, it leaves characters of HTML as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
