"""A chat with a whole service: the bundled model, with a chat template that was given at its start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import grpc
import pytest

from benchmarks.local_service import BESIDE, LocalService, local_service
from runahead.v1 import (
    Chat,
    ChatMessage,
    GenerateOnceRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    RenderChatRequest,
    SamplingOptions,
    ServerStats,
    StatsRequest,
    StoppingOptions,
    TokenizeRequest,
)
from tests.service.commands.terminal import CTRL_C, CTRL_D, PATIENCE_S, on_a_terminal

TEMPLATE: Final = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}# assistant:"
TOKENS: Final = 12


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    with local_service(["--num-blocks", "600", "--chat-template", str(file)]) as running:
        yield running


@pytest.fixture
def stub(service: LocalService) -> Iterator[GenerationServiceStub]:
    with grpc.insecure_channel(service.url) as channel:
        yield GenerationServiceStub(channel)


def stats_when(stub: GenerationServiceStub, there: Callable[[ServerStats], bool]) -> None:
    """Returns when the figures are such."""
    deadline = time.monotonic() + PATIENCE_S
    while not there(stats := stub.Stats(StatsRequest(), timeout=PATIENCE_S).stats):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def completed(stub: GenerationServiceStub, prompt: str) -> str:
    request = GenerateOnceRequest(
        text=prompt, sampling=SamplingOptions(temperature=0), stopping=StoppingOptions(max_tokens=TOKENS)
    )
    return str(stub.GenerateOnce(request, timeout=PATIENCE_S).text)


def test_ctrl_c_cancels_the_request_of_each_answer_and_ctrl_d_ends_the_program(
    service: LocalService, stub: GenerationServiceStub
) -> None:
    flags = ["--ignore-eos", "--max-tokens", "100000"]
    with on_a_terminal(["-m", "runahead", "chat", "--url", service.url, *flags]) as terminal:
        for interrupted in (1, 2):
            terminal.until("> ")
            terminal.press("def read(path):\n")
            stats_when(stub, lambda stats: stats.requests.running == 1)
            terminal.press(CTRL_C)
            terminal.until("[interrupted]")
            stats_when(stub, lambda stats, n=interrupted: stats.front_end.cancelled == n)  # type: ignore[misc]
        stats_when(stub, lambda stats: stats.requests.running == 0)
        terminal.until("> ")
        terminal.press(CTRL_D)
        assert terminal.ends() == 0


def test_the_model_is_given_the_whole_conversation(service: LocalService, stub: GenerationServiceStub) -> None:
    command = [sys.executable, "-m", "runahead", "chat", "--url", service.url, "--max-tokens", str(TOKENS)]
    lines = "def f(x):\n/reset\ndef g(x):\nreturn x\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    first = completed(stub, "# user: def f(x):\n# assistant:")
    second = completed(stub, "# user: def g(x):\n# assistant:")
    third = completed(stub, f"# user: def g(x):\n# assistant: {second}\n# user: return x\n# assistant:")
    assert first and second and third
    assert done.stdout == f"{first}\n{second}\n{third}\n"


def test_one_message_is_answered_as_the_first_of_a_chat(service: LocalService, stub: GenerationServiceStub) -> None:
    command = [sys.executable, "-m", "runahead", "generate", "--url", service.url, "--chat", "def f(x):"]
    flags = ["--max-tokens", str(TOKENS)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == completed(stub, "# user: def f(x):\n# assistant:") + "\n"


def test_messages_in_a_request_are_the_prompt_of_their_template(stub: GenerationServiceStub) -> None:
    chat = Chat(messages=[ChatMessage(role="user", content="def f(x):")])
    shown = stub.RenderChat(RenderChatRequest(chat=chat), timeout=PATIENCE_S)
    assert shown.text == "# user: def f(x):\n# assistant:"
    assert (
        shown.token_ids
        == stub.Tokenize(TokenizeRequest(text=shown.text, add_special_tokens=False), timeout=PATIENCE_S).token_ids
    )
    request = GenerateOnceRequest(
        chat=chat, sampling=SamplingOptions(temperature=0), stopping=StoppingOptions(max_tokens=TOKENS)
    )
    answer = stub.GenerateOnce(request, timeout=PATIENCE_S)
    assert answer.text == completed(stub, shown.text)
    info = stub.GetModelInfo(GetModelInfoRequest(), timeout=PATIENCE_S)
    assert info.chat and info.chat_template == TEMPLATE and set(info.eos_token_ids) <= set(info.chat_end_token_ids)
    stats_when(stub, lambda stats: stats.requests.preparing == 0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--chat-template", "/nowhere"], "--chat-template /nowhere can't be read: No such file or directory"),
        (["--chat-template", "/dev/zero"], "--chat-template /dev/zero can't be read: it has more than 1 MiB"),
        (["--chat-template", "x", "--tokenizer", "none"], "--chat-template has no effect with --tokenizer none"),
    ],
)
def test_a_template_that_can_not_be_used_ends_the_start(flags: list[str], sentence: str) -> None:
    command = [sys.executable, "-m", "runahead", "serve", "--port", "0", *BESIDE, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
