"""`runahead chat` and `runahead generate --chat`, against a server whose tokens are bytes."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runahead.service import cli
from tests.service.commands.chat_service import EVIL, ChatService, said, serving
from tests.service.commands.terminal import CTRL_C, CTRL_D, PATIENCE_S, Terminal, on_a_terminal

MARK = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def service() -> ChatService:
    return ChatService()


@pytest.fixture
def url(service: ChatService) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def terminal(url: str) -> Iterator[Terminal]:
    with on_a_terminal(["-m", "runahead", "chat", "--url", url]) as started:
        started.until("> ")
        yield started


def piped(url: str, lines: str, *flags: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "runahead", "chat", "--url", url, *flags]
    data = lines.encode("utf-8", "surrogateescape")
    return subprocess.run(command, input=data, capture_output=True, timeout=PATIENCE_S, check=False)


# ---------------------------------------------------------------- on a terminal


def test_each_message_is_sent_with_all_that_was_said_before(terminal: Terminal, service: ChatService) -> None:
    terminal.press("hello\n")
    assert "You said hello." in terminal.until("200 tokens/s")
    terminal.until("> ")
    terminal.press("and now\n")
    terminal.until("You said and now.")
    first = ("user", "hello")
    assert service.prompts == [said(first), said(first, ("assistant", "You said hello."), ("user", "and now"))]


def test_ctrl_c_ends_the_answer_and_not_the_program(terminal: Terminal, service: ChatService) -> None:
    terminal.press("endless\n")
    terminal.until("You said endless.")
    terminal.press(CTRL_C)
    assert service.cancelled.wait(PATIENCE_S)
    terminal.until("[interrupted]")
    terminal.until("> ")
    terminal.press("again\n")
    terminal.until("You said again.")
    shown = ("assistant", "You said endless.")
    assert service.prompts[1] == said(("user", "endless"), shown, ("user", "again")), "what was shown was said"


def test_ctrl_c_at_the_prompt_drops_the_line_and_ctrl_d_ends_the_program(
    terminal: Terminal, service: ChatService
) -> None:
    for _ in range(3):
        terminal.press("half a mess")
        terminal.until("half a mess")
        terminal.interrupt()
        terminal.until("(Ctrl-D or /exit ends the chat)")
        terminal.until("> ")
    terminal.press("whole\n")
    terminal.until("tokens/s")
    terminal.until("> ")
    terminal.press(CTRL_D)
    assert terminal.ends() == 0
    assert service.prompts == [said(("user", "whole"))]


def test_reset_forgets_what_was_said_and_exit_ends_the_program(url: str, service: ChatService) -> None:
    with on_a_terminal(["-m", "runahead", "chat", "--url", url, "--system", "Be brief."]) as terminal:
        for line in ("one", "/reset", "//two"):
            terminal.until("> ")
            terminal.press(f"{line}\n")
            if line != "/reset":
                terminal.until("tokens/s")
        terminal.until("> ")
        terminal.press("/exit\n")
        assert terminal.ends() == 0
    system = ("system", "Be brief.")
    assert service.prompts == [said(system, ("user", "one")), said(system, ("user", "/two"))]


def test_help_names_the_commands_and_a_word_that_is_none_is_not_sent(terminal: Terminal, service: ChatService) -> None:
    terminal.press("/help\n")
    shown = terminal.until("//")
    assert all(command in shown for command in ("/help", "/reset", "/exit", "Ctrl-C", "Ctrl-D"))
    terminal.until("> ")
    terminal.press("/rest\n")
    terminal.until("/rest is not a command; /help names them, and // begins a message with /")
    terminal.until("> ")
    assert not service.prompts


def test_what_a_model_writes_does_not_act_on_the_terminal(terminal: Terminal, service: ChatService) -> None:
    terminal.press("evil\n")
    terminal.until(f"a{MARK}]0;title{MARK}b{MARK}2Jc\r\nd\te")  # the terminal itself puts a return before each newline
    terminal.until("tokens/s")
    terminal.until("> ")
    assert "\x1b]0" not in terminal.shown and "\x9b" not in terminal.shown
    assert f"bytes{MARK}[2J, a context of 400 tokens" in terminal.shown, "the model's name is somebody else's word, too"
    terminal.press("next\n")
    terminal.until("You said next.")
    assert service.prompts[1] == said(("user", "evil"), ("assistant", EVIL), ("user", "next")), "as the model wrote it"


def test_a_conversation_that_fills_the_context_is_said_and_not_cut(terminal: Terminal, service: ChatService) -> None:
    terminal.press("x" * 100 + "\n")
    terminal.until("tokens/s")
    terminal.until("> ")
    terminal.press("y" * 100 + "\n")
    sentence = terminal.until("> ")
    assert "INVALID_ARGUMENT: chat has" in sentence
    assert "/reset begins a new conversation" in sentence
    terminal.press("short\n")
    terminal.until("You said short.")
    kept = [("user", "x" * 100), ("assistant", f"You said {'x' * 100}."), ("user", "short")]
    assert service.prompts[1:] == [said(*kept)], "the message that did not fit is no part of it"


def test_a_call_that_fails_is_said_and_the_next_message_is_read(terminal: Terminal, service: ChatService) -> None:
    terminal.press("refuse\n")
    terminal.until(f"runahead chat: RESOURCE_EXHAUSTED: too many{MARK}[2J of them")
    terminal.until("> ")
    terminal.press("hello\n")
    terminal.until("You said hello.")
    assert service.prompts[1] == said(("user", "hello"))


# ---------------------------------------------------------------- without a terminal


def test_lines_from_a_pipe_are_messages_and_answers_alone_go_to_standard_output(url: str, service: ChatService) -> None:
    done = piped(url, "one\n\nevil\n/reset\ntwo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"You said one.\n{EVIL}\nYou said two.\n".encode()
    assert done.stderr.count(b"21 tokens, 200 tokens/s") == 3
    assert service.prompts[2] == said(("user", "two"))


@pytest.mark.parametrize(
    ("lines", "status", "sentence"),
    [
        ("refuse\nlater\n", 1, f"RESOURCE_EXHAUSTED: too many{MARK}[2J of them"),
        ("z" * 500 + "\nlater\n", 1, "; /reset begins a new conversation"),
        ("/quit\nlater\n", 2, "/quit is not a command"),
        ("\udcff\nlater\n", 2, "a message is not UTF-8"),
    ],
)
def test_in_a_pipe_the_first_message_without_an_answer_ends_it(
    lines: str, status: int, sentence: str, url: str, service: ChatService
) -> None:
    done = piped(url, lines)
    assert (done.returncode, done.stdout) == (status, b"")
    assert sentence in done.stderr.decode()
    assert not [prompt for prompt in service.prompts if "later" in prompt]


def test_an_answer_that_was_cut_is_said(url: str) -> None:
    assert b"the answer is cut at --max-tokens" in piped(url, "long\n").stderr


def test_flags_reach_the_request(url: str, service: ChatService) -> None:
    flags = ["--temperature", "0.5", "--max-tokens", "7", "--stop-token-ids", "8", "--cache-salt", "s"]
    assert piped(url, "hello\n", *flags).returncode == 0
    (sent,) = service.requests
    assert (sent.sampling.temperature, sent.stopping.max_tokens, sent.cache_salt) == (0.5, 7, "s")
    assert list(sent.stopping.stop_token_ids) == [8]


def test_without_flags_an_answer_is_greedy_and_bounded(url: str, service: ChatService) -> None:
    assert piped(url, "hello\n").returncode == 0
    (sent,) = service.requests
    assert sent.sampling.HasField("temperature") and sent.sampling.temperature == 0
    assert sent.stopping.max_tokens == 1024


# ---------------------------------------------------------------- where there can be no chat

BOTH = pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "hello"]], ids=["chat", "generate"])


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (
            "chat_template",
            "has no chat template: it can only continue a text, with `runahead generate TEXT`; a chat needs",
        ),
        ("has_tokenizer", "the server has no tokenizer (--tokenizer none), and a chat is text"),
        ("", "install it there with `pip install 'runahead-server[chat]'`"),
    ],
)
def test_a_service_that_takes_no_chats_gets_a_sentence(
    missing: str, sentence: str, url: str, service: ChatService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.info.chat = False
    if missing:
        service.info.ClearField(missing)
    assert cli.main(["chat", "--url", url]) == 1
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.out == "" and "\x1b" not in printed.err
    assert not service.prompts


@BOTH
def test_where_nobody_listens_it_says_so(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--url", "127.0.0.1:1"]) == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err


# ---------------------------------------------------------------- generate --chat


def test_generate_takes_one_message(url: str, service: ChatService, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--chat", "hello", "--system", "Be brief.", "--url", url]) == 0
    assert capsys.readouterr().out == "You said hello.\n"
    assert service.prompts == [said(("system", "Be brief."), ("user", "hello"))]


def test_generate_takes_the_message_from_standard_input(
    url: str, service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert cli.main(["generate", "--chat", "--url", url]) == 0
    assert service.prompts == [said(("user", "piped"))]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--chat", "--token-ids", "1"], "--chat takes a message as text, and no --token-ids"),
        (["--chat", "--add-special-tokens", "x"], "--chat takes no --add-special-tokens"),
        (["--system", "x", "prompt"], "--system is for --chat"),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_what_a_completion_writes_does_not_act_on_the_terminal(url: str) -> None:
    with on_a_terminal(["-m", "runahead", "generate", "--chat", "evil", "--url", url]) as terminal:
        terminal.until(f"a{MARK}]0;title{MARK}b{MARK}2Jc")
        assert terminal.ends() == 0
        assert "\x1b]0" not in terminal.shown and "\x9b" not in terminal.shown
