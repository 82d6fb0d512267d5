"""Renders a chat's prompt like `transformers`, in jinja2's sandbox: chooses the template, sets its variables, and cuts
the text where an answer continues.

A template comes with a checkpoint and is untrusted code. The sandbox limits it to its variables; its process limits
time and memory.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from datetime import datetime
from types import CodeType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from runahead.service.chat.chat_values import ChatFault, chat_values
from runahead.service.chat.template_messages import Asked, Templates

DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"  # the default for a chat with tools, if a template has this name
# Appended to the message that an answer continues, and searched in the rendered text.
_MARK: Final = "<<the answer goes on here>>"
# Modules that filters and methods load on first use, which a confined process can't.
_LATE_MODULES: Final = (
    "decimal", "fractions", "pprint", "random", "textwrap", "unicodedata", "urllib.parse", "encodings.ascii",
    "encodings.latin_1", "encodings.utf_16", "encodings.idna", "jinja2.constants", "jinja2.debug",
)  # fmt: skip
_WARM_UP: Final = (
    "{{ [1, 2.5, now]|tojson(indent=2) }}{{ 'a b'|title|trim|wordwrap(1)|urlize }}{% if x is none %}{% endif %}"
)


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


def load_modules() -> None:
    """Load every module that a rendering may need later."""
    for name in _LATE_MODULES:
        importlib.import_module(name)
    now = datetime.now()
    now.strftime("%c")
    rendered(compiled(_WARM_UP), {"x": None, "now": "now"}, now, most_bytes=1000)


class Rendering:
    """Renders chats one after the other. Keeps compiled templates, and nothing of a chat."""

    def __init__(self, orders: Templates) -> None:
        self._orders = orders
        self._codes: dict[str, CodeType] = {}

    def text(self, asked: Asked) -> str:
        """Render the prompt. Raises ChatFault, TemplateSyntaxError and the errors of `rendered`."""
        values = chat_values(asked, self._orders.tokens, self._orders.special)
        if asked.continue_last:
            last = values["messages"][-1]
            if not isinstance(last.get("content"), str):
                field = f"messages[{len(values['messages']) - 1}].content"
                raise ChatFault(field, "must be set: continue_last continues it")
            last["content"] += _MARK + " "
        now, most_bytes = datetime.fromisoformat(asked.now), self._orders.most_bytes
        try:
            text = rendered(self._code(asked), values, now, most_bytes)
        except UnicodeEncodeError:
            raise ChatFault("", "can't be rendered: it has an unpaired surrogate") from None
        if asked.continue_last:
            text = _cut_at_mark(text)
        if not text:
            raise ChatFault("", "is rendered to an empty prompt")
        return text

    def _code(self, asked: Asked) -> CodeType:
        templates = self._orders.templates
        name = asked.template_name or (_WITH_TOOLS if asked.tools_json and _WITH_TOOLS in templates else DEFAULT)
        if name not in templates:
            known = ", ".join(sorted(templates))
            raise ChatFault("template_name", f"must be one of the model's templates, which are {known}")
        if name not in self._codes:
            self._codes[name] = compiled(templates[name])
        return self._codes[name]


def _cut_at_mark(text: str) -> str:
    """Cut the text at the message's end. A template that strips text after the mark also strips text before it."""
    end = text.rfind(_MARK)
    if end < 0:
        raise ChatFault("continue_last", "can't be done: the chat template does not write the last message as it is")
    return text[:end] if text[end + len(_MARK) :].startswith(" ") else text[:end].rstrip()
