"""A chat's messages: lines typed on a terminal or piped in."""

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
