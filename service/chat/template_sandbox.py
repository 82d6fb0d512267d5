"""A chat template, rendered in jinja2's sandbox as `transformers` renders it.

A template comes with a checkpoint, and is a program that somebody else has written. The sandbox keeps it from
everything but the values that it is given; what it takes of time and memory, its process has to bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


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


def compiled(template: str) -> CodeType:
    """A template's code. Raises TemplateSyntaxError where it is none, and what an operation on constants raises."""
    return _new_sandbox().compile(template)


def rendered(code: CodeType, values: Mapping[str, Any], now: datetime, most_bytes: int) -> str:
    """The text that a template makes of these variables, in a sandbox that nothing else has been in.

    code: see `compiled`. now: local time. most_bytes: of the text in UTF-8.

    Raises RefusedByTemplate, TooLong, and whatever a template can raise that does not make sense: TemplateError,
    MemoryError, RecursionError, or any other exception of an operation in it.
    """
    sandbox = _new_sandbox()
    sandbox.globals.update(strftime_now=now.strftime)
    template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
    parts: list[str] = []
    size = 0
    for part in template.generate(values):
        parts.append(part)
        size += len(part.encode())
        if size > most_bytes:
            raise TooLong(f"is rendered to more than {most_bytes} bytes")
    return "".join(parts)


def _new_sandbox() -> ImmutableSandboxedEnvironment:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals.update(raise_exception=_refuse, strftime_now=str, dict=_dict, namespace=_namespace)
    return sandbox


def _refuse(message: object) -> NoReturn:
    raise RefusedByTemplate(str(message))


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
