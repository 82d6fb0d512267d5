"""Text of a model on standard output: as it is for a file or a pipe, and nothing that a terminal would act on."""

from __future__ import annotations

import io
import sys
import unicodedata
from typing import Final

_KEPT: Final = "\n\t"
# Control characters, of which some begin what moves the cursor, sets a title or has the terminal answer. A carriage
# return would have a line written over, and ends none that a newline does not end.
_MARKS: Final = {
    number: None if number == ord("\r") else "\N{REPLACEMENT CHARACTER}"
    for number in range(0xA0)
    if unicodedata.category(chr(number)) == "Cc" and chr(number) not in _KEPT
}


def harmless(text: str) -> str:
    """The text with a mark for each control character but newlines and tabs. Carriage returns are left out."""
    return text.translate(_MARKS)


class Screen:
    """Standard output, for text as it arrives."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character gets the rest of the text
        self._is_terminal = sys.stdout.isatty()

    def write(self, text: str) -> None:
        """At once. Raises BrokenPipeError where nobody reads any more."""
        sys.stdout.write(harmless(text) if self._is_terminal else text)
        sys.stdout.flush()
