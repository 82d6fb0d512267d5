"""A chat's messages: lines that are typed on a terminal, or read from a pipe or a file."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Final

from runahead.service.commands.request_flags import MOST_CHARACTERS, UsageError

PROMPT: Final = "> "
NOT_UTF8: Final = "a message is not UTF-8"


def piped_lines() -> Generator[str]:
    """Messages from standard input up to its end, one a line. An interrupt ends the program, as it ends any in a pipe.

    Raises UsageError for a line that is no text or too long.
    """
    try:
        for line in iter(lambda: sys.stdin.readline(MOST_CHARACTERS + 1), ""):
            if len(line) > MOST_CHARACTERS:
                raise UsageError(f"a line on standard input has more than {MOST_CHARACTERS} characters")
            yield _checked(line.rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise UsageError(NOT_UTF8) from error


def typed_lines(interrupt: Callable[[], None], say: Callable[[str], None]) -> Generator[str]:
    """Messages from the terminal, with its line editor, up to Ctrl-D. Typed lines are kept in memory alone.

    While it is open, Ctrl-C drops a line that is typed, and calls `interrupt` at any other time, from the signal's
    handler. say: tells the user.
    """
    with contextlib.suppress(ImportError):  # `input` edits lines with it where it is there
        import readline  # noqa: F401
    is_typing = False

    def on_interrupt(_: int, __: FrameType | None) -> None:
        nonlocal is_typing
        if is_typing:
            is_typing = False  # one interrupt for one line: nothing else would catch a second
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
                say("")  # what the shell prints begins on a line of its own
                return
            except KeyboardInterrupt:
                say("\n(Ctrl-D or /exit ends the chat)")
            except (UnicodeDecodeError, UsageError):
                say(f"({NOT_UTF8}, and is not sent)")
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _checked(line: str) -> str:
    """Raises UsageError for a line that can't be sent: with bytes that are no text."""
    try:
        line.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(NOT_UTF8) from error
    return line
