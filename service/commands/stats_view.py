"""Views of figures: in place on a terminal, or appended to a file or pipe."""

from __future__ import annotations

import shutil
from typing import Final

from google.protobuf.json_format import MessageToJson

from runahead.service.commands.stats_text import rate_line, stats_lines
from runahead.v1 import stats_pb2

# VT100 sequences, and xterm's alternate screen.
_OTHER_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
_BACK_AGAIN: Final = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class View:
    """Appends samples as text, with an empty line between them."""

    def __init__(self) -> None:
        self._before: stats_pb2.ServerStats | None = None

    def show(self, stats: stats_pb2.ServerStats) -> None:
        """Show one sample. Raises BrokenPipeError if nobody reads."""
        lines = stats_lines(stats)
        if self._before is not None:
            lines.append(rate_line(self._before, stats))
        self._write(lines)
        self._before = stats

    def end(self) -> None:
        """End the output. Idempotent."""

    def _write(self, lines: list[str]) -> None:
        print("\n".join(lines if self._before is None else ["", *lines]), flush=True)


class JsonLines(View):
    """One JSON line for each sample, in protobuf's JSON with the contract's names and zeros."""

    def show(self, stats: stats_pb2.ServerStats) -> None:
        # protobuf writes 64-bit integers as strings, because not every JSON reader has such numbers.
        text = MessageToJson(
            stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
        )
        print(text, flush=True)


class Screen(View):
    """Shows samples in place on the terminal's alternate screen.

    title: the first line.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._is_open = False

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            print(_BACK_AGAIN, end="", flush=True)

    def _write(self, lines: list[str]) -> None:
        columns, rows = shutil.get_terminal_size()
        shown = "".join(f"{line[:columns]}{_CLEAR_LINE}\n" for line in [self._title, "", *lines][: rows - 1])
        begin = "" if self._is_open else _OTHER_SCREEN
        self._is_open = True
        print(begin + _HOME + shown + _CLEAR_BELOW, end="", flush=True)
