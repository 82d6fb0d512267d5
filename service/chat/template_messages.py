"""What a front end and a process that renders chats say to each other: lines of JSON, one for each of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

TEMPLATE_MODULE = "runahead.service.chat.template_process"
RENDER_S = 3.0  # of processor time that a rendering may take
MEMORY_BYTES = 512 << 20  # of addresses that the process may take
# What went wrong. request: the chat, or the template refuses it; cost: it takes more time, memory or text than one may;
# template: the template is none.
Fault = Literal["", "request", "cost", "template"]


class Templates(msgspec.Struct, frozen=True):
    """Said first, once. templates: by their names. tokens: special tokens by the names under which templates ask for
    them. special: every special token, as a text spells it. most_bytes: of a rendered text in UTF-8."""

    templates: Mapping[str, str]
    tokens: Mapping[str, str]
    special: Sequence[str]
    most_bytes: int


class Asked(msgspec.Struct, frozen=True):
    """A chat to render. messages: the fields that are set of each, by their names in the contract. template_name: empty
    for the default. now: the server's clock, local time in ISO 8601. letter: in place of each visible character of the
    texts, roles left as they are; empty: the texts themselves."""

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
    """text: the prompt. fault, sentence: why there is none; field: its path in the chat, empty for all of it. is_last:
    the process ends behind this answer."""

    text: str = ""
    fault: Fault = ""
    field: str = ""
    sentence: str = ""
    is_last: bool = False
