"""Renders a chat template in jinja2's sandbox like `transformers`.

A template comes with a checkpoint and is untrusted code. The sandbox limits it to its variables; its process limits
time and memory.
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
    """Raised by the template itself for messages that it refuses, with its reason."""


class TooLong(ValueError):
    """The rendered text exceeds its bound."""


class _Generation(Extension):
    """`{% generation %}`, which marks answers for trainers: its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012, as the library declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


class _PublicNamespace(Namespace):
    """A namespace that refuses Python's private names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace can't have {name!r}")
        super().__setitem__(name, value)


def compiled(template: str) -> CodeType:
    """Compile a template. Raises TemplateSyntaxError, and errors of operations on constants."""
    return _new_sandbox().compile(template)


def rendered(code: CodeType, values: Mapping[str, Any], now: datetime, most_bytes: int) -> str:
    """Render a template with these variables in a new sandbox.

    code: see `compiled`. now: local time. most_bytes: bound of the text in UTF-8.

    Raises RefusedByTemplate, TooLong and any error of a wrong template: TemplateError, MemoryError, RecursionError, or
    an operation's exception.
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
    """Replaces the type `dict`, which has more methods than a template needs."""
    return dict(*arguments, **values)


def _namespace(*arguments: Any, **values: Any) -> Namespace:
    made = _PublicNamespace()
    for name, value in dict(*arguments, **values).items():
        made[name] = value
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialize to JSON; unlike the library's filter, leaves HTML characters unescaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
