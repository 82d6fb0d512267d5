"""Chat templates: what `transformers` makes of them, and what a template that means no good may do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import Final

import pytest
from transformers import PreTrainedTokenizerFast

from runahead.service.chat.template_messages import MEMORY_BYTES
from runahead.service.commands.chat_template import ChatError, ChatTemplate, Message
from tests.service.chat.templates import ANSWER, CHATML, CONVERSATIONS, MISTRAL, TEMPLATES, TOKENS, USER
from tests.service.commands.terminal import PATIENCE_S
from tests.service.service_processes import has_ended, watched
from tests.service.small_tokenizers import byte_level_tokenizer


def rendered(template: str, messages: list[Message] | None = None) -> str:
    with ChatTemplate(template, TOKENS) as chat_template:
        return chat_template.render([USER] if messages is None else messages)


def by_transformers(template: str, messages: list[Message]) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), chat_template=template, **TOKENS)
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=list(CONVERSATIONS))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_template_gives_what_transformers_gives(template: str, messages: list[Message]) -> None:
    text = rendered(template, messages)
    assert text == by_transformers(template, messages)
    assert messages[-1]["content"].strip() in text or "tojson" in template, "nothing would be compared"


def test_a_template_that_refuses_says_why_in_one_line() -> None:
    with pytest.raises(ChatError) as refusal:
        rendered(MISTRAL, [USER, USER])
    assert str(refusal.value) == (
        "messages are refused by the chat template: conversation roles must alternate "
        "user/assistant/user/assistant/...; `runahead generate` without --chat does without the chat template"
    )
    with pytest.raises(ChatError, match=re.escape("the chat template: a \N{REPLACEMENT CHARACTER}]0;x b")):
        rendered("{{ raise_exception('a\\n\\x1b]0;x\\nb') }}")


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


@pytest.mark.parametrize("template", ESCAPES.values(), ids=list(ESCAPES))
def test_a_template_reaches_nothing_but_its_values(template: str) -> None:
    try:
        text = rendered(template)
    except ChatError as error:
        text = "" if "to an empty prompt" in str(error) else str(error)
    # Either nothing, or a sentence that says what is not allowed, and quotes at most the name that was asked for.
    assert not re.search("<class|<function|root:|datetime'", text)
    assert not text or re.search("unsafe|undefined|not safe|has no attribute|can't have|no loader|not allowed", text), (
        text
    )


BROKEN: Final = {
    "syntax": ("{% for %}", "Expected an expression"),
    "a value that is not there": ("{{ messages[0].content.a.b }}", "has no attribute"),
    "an operation": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "a recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template calls itself without an end"),
    "a text without an end": (
        "{% for a in range(90000) %}{% for b in range(90000) %}{{ 'x' * 9000 }}{% endfor %}{% endfor %}",
        "is rendered to more than 4194304 bytes",
    ),
    "memory": ("{{ ('x' * 10000000000) | length }}", f"needs more than {MEMORY_BYTES >> 20} MiB of memory"),
    "a loop without an end": (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% set c = a * b %}{% endfor %}{% endfor %}",
        "takes longer to be rendered than a chat may",
    ),
    "a number without an end": ("{{ 9 ** (9 ** 9) }}", "takes longer to be rendered than a chat may"),
}


@pytest.mark.parametrize(("template", "sentence"), BROKEN.values(), ids=list(BROKEN))
def test_a_template_that_does_not_work_is_ended_with_a_sentence(template: str, sentence: str) -> None:
    with ChatTemplate(template, TOKENS) as chat_template:
        with pytest.raises(ChatError, match="the chat ") as refusal:
            chat_template.render([USER])
        assert sentence in str(refusal.value)
        assert len(str(refusal.value)) < 500 and "\n" not in str(refusal.value)


def test_one_template_renders_again_after_messages_that_it_refuses() -> None:
    with ChatTemplate(MISTRAL, TOKENS) as chat_template:
        chat_template.start()
        first = chat_template.render([USER])
        with pytest.raises(ChatError):
            chat_template.render([ANSWER])
        assert chat_template.render([USER]) == first == by_transformers(MISTRAL, [USER])


def test_a_process_that_was_ended_from_outside_is_said() -> None:
    with ChatTemplate(CHATML, TOKENS) as chat_template:
        chat_template.start()
        process = chat_template._process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        process.wait()
        with pytest.raises(ChatError, match="ended with exit code -15"):
            chat_template.render([USER])


def test_no_process_is_left() -> None:
    with ChatTemplate(CHATML, TOKENS) as chat_template:
        chat_template.start()
        process = chat_template._process
        assert isinstance(process, subprocess.Popen)
    assert process.returncode is not None
    with ChatTemplate("{{ 9 ** (9 ** 9) }}", TOKENS) as chat_template:
        chat_template.start()
        process = chat_template._process
    assert process is not None and process.returncode is not None


def test_the_process_ends_when_the_program_is_killed() -> None:
    script = (
        "import sys, time\n"
        "from runahead.service.commands.chat_template import ChatTemplate\n"
        "template = ChatTemplate('', {})\n"
        "template.start()\n"
        "print(template._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        with watched(int(program.stdout.readline())) as process:
            program.kill()
            assert has_ended(process, PATIENCE_S)
