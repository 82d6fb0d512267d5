"""Prints a model's text: unchanged to a file or pipe, without control characters to a terminal."""

from __future__ import annotations

import io
import sys
import unicodedata
from typing import Final

_KEPT: Final = "\n\t"
# Control characters may move the cursor, set a title or make the terminal answer. A carriage return alone would
# overwrite the line.
_MARKS: Final = {
    number: None if number == ord("\r") else "\N{REPLACEMENT CHARACTER}"
    for number in range(0xA0)
    if unicodedata.category(chr(number)) == "Cc" and chr(number) not in _KEPT
}


def harmless(text: str) -> str:
    """Replace control characters except newlines and tabs, and drop carriage returns."""
    return text.translate(_MARKS)


class Screen:
    """Standard output for text as it arrives."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # replaces characters that the terminal can't encode
        self._is_terminal = sys.stdout.isatty()

    def write(self, text: str) -> None:
        """Write and flush. Raises BrokenPipeError if nobody reads."""
        sys.stdout.write(harmless(text) if self._is_terminal else text)
        sys.stdout.flush()
