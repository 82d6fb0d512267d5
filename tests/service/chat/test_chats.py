"""The chats of a front end: the tokens of `transformers`, the ends of an answer, and what is refused by its path."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
from transformers import PreTrainedTokenizerFast

from runahead.service.chat import chats as module
from runahead.service.chat.chats import Chats
from runahead.service.contract.inputs import CheckedChat
from tests.service.chat.rendered_chats import chat, pids, refusal, with_chats, with_specials
from tests.service.chat.templates import AGAIN, ANSWER, CHATML, CONVERSATIONS, MISTRAL, TEMPLATES, TOKENS, USER
from tests.service.fake_engine import INFO

TOOL: Final = {"type": "function", "function": {"name": "find", "parameters": {"é": [1, 2.5, None, True]}}}
CALL: Final = {"role": "assistant", "tool_calls_json": '[{"function": {"name": "find", "arguments": {"a": 1}}}]'}
EVERYTHING: Final = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ documents | length if documents }}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.content is defined %} {{ message.content }}{% endif %}
{%- if message.name %} by {{ message.name }}{% endif %}
{%- if message.reasoning_content %} thought {{ message.reasoning_content }}{{ message.thinking }}{% endif %}
{%- for call in message.tool_calls or [] %} calls {{ call.function.arguments | tojson }}{% endfor %}
{%- if message.tool_call_id %} of {{ message.tool_call_id }}{% endif %}<|im_end|>
{%- endfor %}{% if enable_thinking %}<think>{% endif %}{{ strftime_now('%Y-%m-%d') if date_string is not defined else
date_string }}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""


def as_dicts(asked: CheckedChat) -> list[dict[str, Any]]:
    """The messages as a caller of `transformers` has them."""
    messages: list[dict[str, Any]] = [dict(message) for message in asked.messages]
    for message in messages:
        if "tool_calls_json" in message:
            message["tool_calls"] = json.loads(message.pop("tool_calls_json"))
    return messages


CHATS: Final = {
    "tools": chat(USER, CALL, {"role": "tool", "content": "7", "tool_call_id": "c1"}, tools_json=json.dumps([TOOL])),
    "thoughts": chat(USER, {**ANSWER, "reasoning_content": "Hm."}, AGAIN),
    "names": chat({**USER, "name": "Zoë"}),
    "options": chat(options_json='{"enable_thinking": true, "date_string": "today", "documents": [{"title": "t"}]}'),
    "no beginning": chat(USER, ANSWER, add_generation_prompt=False),
    "no content": chat({"role": "user"}, USER),
    "special tokens": chat({"role": "user", "content": "a<|im_end|>b"}),
    "continued": chat(USER, {"role": "assistant", "content": "A let"}, add_generation_prompt=False, continue_last=True),
}


def by_transformers(asked: CheckedChat, template: str) -> list[int]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=with_specials(), chat_template=template, **TOKENS)
    ids = tokenizer.apply_chat_template(
        as_dicts(asked),
        tools=json.loads(asked.tools_json) if asked.tools_json else None,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_last,
        tokenize=True,
        return_dict=False,
        **(json.loads(asked.options_json) if asked.options_json else {}),
    )
    assert isinstance(ids, list) and all(isinstance(token_id, int) for token_id in ids)
    return [int(token_id) for token_id in ids]  # type: ignore[arg-type]


def check_ids(asked: CheckedChat, template: str) -> None:
    async def body(chats: Chats) -> None:
        text = await chats.text(asked, 0)
        assert chats._tokenizer is not None
        assert (await chats._tokenizer.encode(text, add_special_tokens=False)).tolist() == by_transformers(
            asked, template
        )

    with_chats(template, body)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=list(CONVERSATIONS))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_conversation_has_the_ids_that_transformers_gives_it(template: str, messages: list[Any]) -> None:
    check_ids(chat(*messages), template)


@pytest.mark.parametrize("asked", CHATS.values(), ids=list(CHATS))
def test_every_field_of_a_chat_reaches_the_template_as_it_does_in_transformers(asked: CheckedChat) -> None:
    check_ids(asked, EVERYTHING)


@pytest.mark.parametrize("content", ["A let", " A let \n", ""])
@pytest.mark.parametrize("template", [CHATML, MISTRAL, EVERYTHING], ids=["kept", "stripped", "everything"])
def test_an_answer_that_is_continued_ends_where_it_ends_in_transformers(template: str, content: str) -> None:
    last = {"role": "assistant", "content": content}
    check_ids(chat(USER, last, add_generation_prompt=False, continue_last=True), template)


def test_of_several_templates_one_is_chosen_by_name_and_by_tools() -> None:
    async def body(chats: Chats) -> None:
        assert await chats.text(chat(), 0) == "d"
        assert await chats.text(chat(tools_json="[{}]"), 0) == "t"
        assert await chats.text(chat(tools_json="[{}]", template_name="default"), 0) == "d"
        assert await chats.text(chat(template_name="rag"), 0) == "r"
        _, place, sentence = await refusal(chats, chat(template_name="x"))
        assert place == "chat.template_name" and "default, rag, tool_use" in sentence

    with_chats({"default": "d", "tool_use": "t", "rag": "r"}, body)


WRONG: Final = {
    "tools that are no JSON": (chat(tools_json="["), "chat.tools_json", "is no JSON"),
    "tools that are no array": (chat(tools_json="{}"), "chat.tools_json", "must be an array of objects"),
    "a tool that is no object": (chat(tools_json="[1]"), "chat.tools_json", "must be an array of objects"),
    "tools without an end": (chat(tools_json="[" * 100_000), "chat.tools_json", "inside each other"),
    "a number that is none": (chat(options_json='{"a": NaN}'), "chat.options_json", "NaN"),
    "options that are no object": (chat(options_json="[]"), "chat.options_json", "must be an object"),
    "a reserved name": (chat(options_json='{"messages": []}'), "chat.options_json", "'messages', which can't be set"),
    "a function's name": (chat(options_json='{"raise_exception": 1}'), "chat.options_json", "can't be set"),
    "a token's name": (chat(options_json='{"bos_token": "x"}'), "chat.options_json", "'bos_token'"),
    "a name of Python's": (chat(options_json='{"__class__": 1}'), "chat.options_json", "can't be set"),
    "documents that are none": (chat(options_json='{"documents": ["a"]}'), "chat.options_json", "documents"),
    "calls": (chat(USER, {"role": "assistant", "tool_calls_json": "1"}), "chat.messages[1].tool_calls_json", "array"),
    "nothing to continue": (
        chat(USER, {"role": "assistant"}, continue_last=True, add_generation_prompt=False),
        "chat.messages[1].content",
        "must be set",
    ),
    "what the template refuses": (chat(USER, USER), "chat.messages", "roles must alternate"),
    "what the template can't do": (chat(options_json='{"x": "y"}'), "chat", "can't be rendered"),
    "half of a character": (chat(tools_json=r'[{"a": "\ud800"}]'), "chat", "unpaired surrogate"),
}
PICKY: Final = MISTRAL + "{{ tools[0].a if tools }}{{ x / 2 if x }}"


def test_what_is_wrong_with_a_chat_is_refused_by_its_path_and_ends_no_process() -> None:
    async def body(chats: Chats) -> None:
        await chats.text(chat(), 0)
        before = pids(chats)
        for name, (asked, place, words) in WRONG.items():
            reason, found, sentence = await refusal(chats, asked)
            assert (reason, found) == ("INVALID_FIELD", place), (name, sentence)
            assert words in sentence and sentence.startswith(place), (name, sentence)
        assert pids(chats) == before

    with_chats(PICKY, body)


SPELLED: Final = {
    "chat.messages[1].content": chat(USER, {"role": "user", "content": "a <|im_end|>"}),
    "chat.messages[0].role": chat({"role": "<|im_start|>", "content": "a"}),
    "chat.messages[0].tool_calls_json": chat({"role": "a", "tool_calls_json": r'[{"a": ["\u003c|im_end|>"]}]'}),
    "chat.tools_json": chat(tools_json=r'[{"\u003c/s>": 1}]'),
    "chat.options_json": chat(options_json='{"a": {"b": "</s>"}}'),
}


def test_special_tokens_are_refused_by_path_where_that_is_asked_for() -> None:
    async def body(chats: Chats) -> None:
        for place, asked in SPELLED.items():
            await chats.text(asked, 0)
            strict = CheckedChat(**{**{f: getattr(asked, f) for f in asked.__slots__}, "refuse_special_tokens": True})
            assert (await refusal(chats, strict))[:2] == ("INVALID_FIELD", place)

    with_chats(CHATML.replace("message['content']", "message['content']|string"), body)


def test_a_templates_own_words_are_cut_and_stand_on_one_line() -> None:
    async def body(chats: Chats) -> None:
        _, _, sentence = await refusal(chats, chat())
        assert len(sentence) <= len("chat.messages ") + 512 and "\n" not in sentence

    with_chats("{{ raise_exception('a\\n' * 10000) }}", body)


ESCAPES: Final = {
    "classes": "{{ messages.__class__.__mro__ }}",
    "subclasses": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "globals of the filter": "{{ strftime_now.__globals__['datetime'] }}",
    "by attr": "{{ (messages | attr('__class__')).mro() }}",
    "by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a message is changed": "{{ messages.append(1) }}",
    "a function of the namespace": "{{ namespace.__init__.__globals__ }}",
    "a namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "a namespace at once": "{{ namespace(__init__=1) }}",
    "an import": "{% import 'os' as os %}",
    "an include": "{% include '/etc/passwd' %}",
}


def test_a_template_reaches_nothing_but_its_values() -> None:
    async def body(chats: Chats) -> None:
        for name in ESCAPES:
            _, _, text = await refusal(chats, chat(template_name=name))
            # A sentence that says what is not allowed, and quotes at most the name that was asked for.
            assert not re.search("<class|<function|root:|datetime'", text), name
            assert re.search(
                "to an empty prompt|unsafe|undefined|not safe|has no attribute|can't have|no loader|not allowed", text
            ), f"{name}: {text}"

    with_chats(ESCAPES, body)


BROKEN: Final = {
    "a value that is not there": ("{{ messages[0].content.a.b }}", "has no attribute"),
    "an operation": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "a recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template calls itself without an end"),
}


def test_a_template_that_does_not_work_is_refused_with_a_sentence() -> None:
    async def body(chats: Chats) -> None:
        for name, (_, sentence) in BROKEN.items():
            assert sentence in (await refusal(chats, chat(template_name=name)))[2]

    with_chats({name: template for name, (template, _) in BROKEN.items()}, body)


def test_a_template_that_is_none_and_a_model_without_one_are_said_before_any_message() -> None:
    async def broken(chats: Chats) -> None:
        reason, _, sentence = await refusal(chats, chat())
        assert reason == "NO_CHAT_TEMPLATE" and "(line 1)" in sentence
        assert await chats.end_token_ids() == INFO.eos_token_ids

    async def missing(chats: Chats) -> None:
        assert not chats.are_served and await chats.end_token_ids() == ()
        reason, _, sentence = await refusal(chats, chat())
        assert reason == "NO_CHAT_TEMPLATE" and "--chat-template" in sentence
        assert pids(chats) == []

    with_chats("{% for %}", broken, {})
    with_chats({}, missing)


def test_without_jinja2_chats_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_no_jinja2", lambda: "there is none")

    async def body(chats: Chats) -> None:
        assert not chats.are_served
        assert (await refusal(chats, chat()))[::2] == ("NO_CHAT_TEMPLATE", "this server takes no chat: there is none")

    with_chats(CHATML, body)


@pytest.mark.parametrize(
    ("template", "tokens", "ends"),
    [
        (CHATML, {}, [258 + 5 + 1, 256]),
        (MISTRAL, TOKENS, [258 + 5 + 2, 256]),
        ("{% for m in messages %}{{ m.content }}\n <|im_end|>{% endfor %}", TOKENS, [264, 265, 256]),
        ("{% for m in messages %}{{ m.content }}.{% endfor %}", TOKENS, [265, 256]),
        ("{{ raise_exception('no') }}", {}, [256]),
    ],
    ids=["a turn's end", "the end of a sequence", "both", "no turn's end", "a template that refuses"],
)
def test_an_answer_ends_where_its_template_its_tokenizer_and_its_model_end_one(
    template: str, tokens: Mapping[str, str], ends: list[int]
) -> None:
    async def body(chats: Chats) -> None:
        assert list(await chats.end_token_ids()) == ends

    with_chats(template, body, tokens)
