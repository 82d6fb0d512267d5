"""Renders a chat's prompt like `transformers`: chooses the template, sets its variables, and cuts the text where an
answer continues.
"""

from __future__ import annotations

import importlib
from datetime import datetime
from types import CodeType
from typing import Final

from runahead.service.chat.chat_values import ChatFault, chat_values
from runahead.service.chat.template_messages import Asked, Templates
from runahead.service.chat.template_sandbox import compiled, rendered

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
        """Render the prompt. Raises ChatFault, TemplateSyntaxError and the errors of `template_sandbox.rendered`."""
        values = chat_values(asked, self._orders.tokens, self._orders.special)
        if asked.continue_last:
            last = values["messages"][-1]
            if not isinstance(last.get("content"), str):
                place = f"messages[{len(values['messages']) - 1}].content"
                raise ChatFault(place, "must be set: continue_last continues it")
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
