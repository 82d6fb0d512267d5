"""Where a chat's messages come from: lines that are typed on a terminal, or read from a pipe or a file."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final, Protocol

from runahead.service.commands.request_flags import MOST_CHARACTERS, UsageError

PROMPT: Final = "> "
NOT_UTF8: Final = "a message is not UTF-8"


class Lines(Protocol):
    """Messages, one a line, without the line's end. Iteration raises UsageError for one that is no text."""

    def __iter__(self) -> Iterator[str]: ...

    def __enter__(self) -> Lines: ...

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None: ...


class PipedLines:
    """From standard input, up to its end. An interrupt ends the program, as it ends any in a pipe."""

    def __enter__(self) -> PipedLines:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Nothing is open."""

    def __iter__(self) -> Iterator[str]:
        try:
            for line in iter(lambda: sys.stdin.readline(MOST_CHARACTERS + 1), ""):
                if len(line) > MOST_CHARACTERS:
                    raise UsageError(f"a line on standard input has more than {MOST_CHARACTERS} characters")
                yield _checked(line.rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise UsageError(NOT_UTF8) from error


class TypedLines:
    """From the terminal, with its line editor, up to Ctrl-D. What was typed is kept in memory alone.

    As a context manager it owns Ctrl-C: while a line is typed, that line is dropped; at any other time `interrupt` is
    called. Neither ends the program, however often it is pressed.
    """

    def __init__(self, interrupt: Callable[[], None], say: Callable[[str], None]) -> None:
        self._interrupt = interrupt
        self._say = say
        self._is_typing = False
        self._before: Any = None

    def __enter__(self) -> TypedLines:
        with contextlib.suppress(ImportError):  # `input` edits lines with it where it is there
            import readline  # noqa: F401
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before or signal.SIG_DFL)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                yield _checked(self._typed())
            except EOFError:
                self._say("")  # what the shell prints begins on a line of its own
                return
            except KeyboardInterrupt:
                self._say("\n(Ctrl-D or /exit ends the chat)")
            except (UnicodeDecodeError, UsageError):
                self._say(f"({NOT_UTF8}, and is not sent)")

    def _typed(self) -> str:
        try:
            self._is_typing = True
            return input(PROMPT)
        finally:
            self._is_typing = False

    def _on_interrupt(self, _: int, __: FrameType | None) -> None:
        if self._is_typing:
            self._is_typing = False  # one interrupt for one line: nothing else would catch a second
            raise KeyboardInterrupt
        self._interrupt()


def _checked(line: str) -> str:
    """Raises UsageError for a line that can't be sent: with bytes that are no text."""
    try:
        line.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(NOT_UTF8) from error
    return line
