"""`runahead chat`: a conversation with the served model."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from types import FrameType
from typing import Final

import grpc

from runahead.runtime.log_output import printable
from runahead.service.commands.client import EXIT_USAGE, Cancelled, ClientCalls, describe_failure, refused_fields
from runahead.service.commands.client_channel import endpoint
from runahead.service.commands.ends import EXIT_FAILED, EXIT_INTERRUPTED
from runahead.service.commands.generate_command import tokens_per_second
from runahead.service.commands.request_flags import (
    MOST_CHARACTERS,
    UsageError,
    add_field_flags,
    add_system_flag,
    build_options,
    chat_request,
    seconds_of,
    system_messages,
    system_of,
)
from runahead.service.commands.terminal_text import Screen, harmless
from runahead.v1 import generate_pb2, model_pb2

PROMPT: Final = "> "
NOT_UTF8: Final = "a message is not UTF-8"

# A chat sends several requests, its template writes the special tokens, and only text is shown.
_NOT_FOR_A_CHAT: Final = ("request_id", "n", "add_special_tokens", "output")
_HELP: Final = """\
/help     shows this
/reset    begins a new conversation; the system prompt stays
/exit     ends the chat, as Ctrl-D does
Ctrl-C    ends an answer; what was shown of it stays in the conversation
A message that begins with / is written with two: //"""
_LENGTH = generate_pb2.FINISH_REASON_LENGTH
_CONTEXT = generate_pb2.FINISH_REASON_CONTEXT_LENGTH
_ABORTED = generate_pb2.FINISH_REASON_ABORTED


def why_no_chat(info: model_pb2.GetModelInfoResponse) -> str:
    """Return why the server takes no chats, as a sentence without a period; empty if it does."""
    if info.chat:
        return ""
    if not info.has_tokenizer:
        return "the server has no tokenizer (--tokenizer none), and a chat is text"
    if info.chat_template:
        return (
            "the server does not render chats: it needs the package jinja2, 3.1.6 or newer; install it there with "
            "`pip install 'runahead-server[chat]'`"
        )
    return (
        f"the served model {printable(info.model)} has no chat template: it can only continue a text, with "
        "`runahead generate TEXT`; a chat needs an instruct model, whose checkpoint brings one"
    )


class Conversation:
    """The messages of a user and the model's answers. Grows by one message and its answer together.

    options: of every request. system: the first message, if any.
    """

    def __init__(self, calls: ClientCalls, options: generate_pb2.GenerateRequest, system: str | None) -> None:
        self._calls = calls
        self._options = options
        self._system = system_messages(system)
        self._said: list[generate_pb2.ChatMessage] = []

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self._said = []

    def ask(self, text: str, show: Callable[[str], None]) -> generate_pb2.Finished:
        """Show the answer as it arrives and return its end.

        Raises grpc.RpcError and does not keep the message. Raises Cancelled and keeps the message with the shown part
        of the answer, if any.
        """
        messages = [*self._said, generate_pb2.ChatMessage(role="user", content=text)]
        request = chat_request(self._options, [*self._system, *messages])
        parts: list[str] = []
        finished = generate_pb2.Finished()
        try:
            with contextlib.closing(self._calls.generate(request)) as responses:
                for response in responses:
                    if response.HasField("delta") and response.delta.text:
                        parts.append(response.delta.text)
                        show(response.delta.text)
                    elif response.HasField("finished"):
                        finished = response.finished
        except Cancelled:
            if parts:
                self._said = [*messages, _answer(parts)]
            raise
        self._said = [*messages, _answer(parts)]
        return finished


def _answer(parts: list[str]) -> generate_pb2.ChatMessage:
    return generate_pb2.ChatMessage(role="assistant", content="".join(parts))


def piped_lines() -> Generator[str]:
    """Yield messages from standard input, one a line. An interrupt ends the program.

    Raises UsageError for a line that is not UTF-8 or too long.
    """
    try:
        for line in iter(lambda: sys.stdin.readline(MOST_CHARACTERS + 1), ""):
            if len(line) > MOST_CHARACTERS:
                raise UsageError(f"a line on standard input has more than {MOST_CHARACTERS} characters")
            yield _checked(line.rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise UsageError(NOT_UTF8) from error


def typed_lines(interrupt: Callable[[], None], say: Callable[[str], None]) -> Generator[str]:
    """Yield messages from the terminal's line editor until Ctrl-D. History stays in memory.

    Ctrl-C drops the line being typed, and otherwise calls `interrupt` from the signal's handler. say: prints for the
    user.
    """
    with contextlib.suppress(ImportError):  # `input` uses it for editing if available
        import readline  # noqa: F401
    is_typing = False

    def on_interrupt(_: int, __: FrameType | None) -> None:
        nonlocal is_typing
        if is_typing:
            is_typing = False  # one interrupt for a line: nothing would catch a second
            raise KeyboardInterrupt
        interrupt()

    def typed() -> str:
        nonlocal is_typing
        try:
            is_typing = True
            return input(PROMPT)
        finally:
            is_typing = False

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        while True:
            try:
                yield _checked(typed())
            except EOFError:
                say("")  # so that the shell's prompt begins a new line
                return
            except KeyboardInterrupt:
                say("\n(Ctrl-D or /exit ends the chat)")
            except (UnicodeDecodeError, UsageError):
                say(f"({NOT_UTF8}, and is not sent)")
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _checked(line: str) -> str:
    """Check a line. Raises UsageError for invalid bytes."""
    try:
        line.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(NOT_UTF8) from error
    return line


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the system prompt and of sampling and stopping."""
    add_system_flag(parser)
    parser.add_argument("--timeout", metavar="SECONDS", help="give up an answer after this long")
    add_field_flags(parser, without=_NOT_FOR_A_CHAT)


def run(arguments: argparse.Namespace) -> int:
    """Converse until the input ends. Returns the exit status.

    0: the input has ended. 1: the server has no chats, or without a terminal a message failed and later ones were not
    sent. 2: a flag or a message is invalid. 130: interrupted; on a terminal that only ends an answer.
    """
    server = endpoint(arguments)
    timeout_s = None if arguments.timeout is None else seconds_of(arguments.timeout)
    options, system = build_options(arguments), system_of(arguments)
    is_typed = sys.stdin.isatty() and sys.stdout.isatty()
    with server.channel() as channel:
        calls = ClientCalls(channel, server.metadata, timeout_s)
        info = calls.model_info()
        if why := why_no_chat(info):
            _say(f"runahead chat: {why}")
            return EXIT_FAILED
        with contextlib.closing(typed_lines(calls.cancel, _say) if is_typed else piped_lines()) as lines:
            return _Chat(info, calls, Conversation(calls, options, system), arguments.url, is_typed).run(lines)


class _Chat:
    """One user's chat.

    is_typed: on a terminal, where a failed message is reported and the next one is read.
    """

    def __init__(
        self,
        info: model_pb2.GetModelInfoResponse,
        calls: ClientCalls,
        conversation: Conversation,
        url: str,
        is_typed: bool,
    ) -> None:
        self._info = info
        self._calls = calls
        self._conversation = conversation
        self._url = url
        self._is_typed = is_typed
        self._screen = Screen()

    def run(self, lines: Iterable[str]) -> int:
        """Run the chat and return the exit status."""
        info = self._info
        if self._is_typed:
            _say(f"{printable(info.model)}, a context of {info.context_length} tokens. /help names the commands.")
        for line in lines:
            if line.strip() == "/exit":
                break
            status = self._line(line)
            if status and not self._is_typed:
                return status
        return 0

    def _line(self, line: str) -> int:
        """Answer a message or run a command. Returns an exit status, 0 without a failure."""
        command = line.strip()
        if command == "/help":
            _say(_HELP)
        elif command == "/reset":
            self._conversation.reset()
        elif command.startswith("/") and not line.startswith("//"):
            word = printable(command.split()[0])
            _say(f"runahead chat: {word} is not a command; /help names them, and // begins a message with /")
            return EXIT_USAGE
        elif command:
            return self._message(line[1:] if line.startswith("//") else line)
        return 0

    def _message(self, text: str) -> int:
        self._calls.resume()
        try:
            finished = self._conversation.ask(text, self._screen.write)
        except Cancelled:
            _say("\n[interrupted]")
            return EXIT_INTERRUPTED
        except grpc.RpcError as error:
            hint = "; /reset begins a new conversation" if "chat" in refused_fields(error) else ""
            _say(f"\nrunahead chat: {describe_failure(error, self._url)}{hint}")
            return EXIT_FAILED
        self._screen.write("\n")
        _say(f"[{self._end_of(finished)}]")
        return 0

    def _end_of(self, finished: generate_pb2.Finished) -> str:
        """Describe an answer's end: duration, context use, and the reason if the model did not end it."""
        usage, context = finished.usage, self._info.context_length
        pace = tokens_per_second(finished)
        parts = [
            f"{usage.completion_tokens} tokens" + ("" if pace is None else f", {pace:.0f} tokens/s"),
            f"{usage.prompt_tokens + usage.completion_tokens} of {context} in the context",
        ]
        why = {
            _LENGTH: "the answer is cut at --max-tokens",
            _CONTEXT: "the context is full: /reset begins a new conversation",
            _ABORTED: "somebody has aborted the answer",
        }
        return "; ".join([*parts, *([why[finished.reason]] if finished.reason in why else [])])


def _say(sentence: str) -> None:
    """Print on standard error, without control characters of a server's words."""
    print(harmless(sentence), file=sys.stderr, flush=True)
