"""Messages between a front end and a rendering process: JSON lines, one for each of these classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

TEMPLATE_MODULE = "runahead.service.chat.template_process"
RENDER_S = 3.0  # of processor time for a rendering
MEMORY_BYTES = 512 << 20  # of the process's address space
# The fault. request: the chat or the template refuses it; cost: it takes too much time, memory or text; template: the
# template is invalid.
Fault = Literal["", "request", "cost", "template"]


class Templates(msgspec.Struct, frozen=True):
    """The first message. templates: by name. tokens: special tokens by the names that templates use. special: every
    special token's text. most_bytes: bound of a rendered text in UTF-8.
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]
    special: Sequence[str]
    most_bytes: int


class Asked(msgspec.Struct, frozen=True):
    """A chat to render. messages: the set fields of each, by contract name. template_name: empty for the default. now:
    the server's local time in ISO 8601. letter: replaces each visible character of texts other than roles; empty leaves
    texts unchanged.
    """

    messages: Sequence[Mapping[str, str]]
    now: str
    tools_json: str = ""
    options_json: str = ""
    add_generation_prompt: bool = True
    continue_last: bool = False
    template_name: str = ""
    refuse_special_tokens: bool = False
    letter: str = ""


class Rendered(msgspec.Struct, frozen=True):
    """The result. text: the prompt. fault, sentence: why there is none; field: the path in the chat, empty for the
    whole chat. is_last: the process ends after this answer.
    """

    text: str = ""
    fault: Fault = ""
    field: str = ""
    sentence: str = ""
    is_last: bool = False
