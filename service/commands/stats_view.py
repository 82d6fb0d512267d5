"""Views of figures: in place on a terminal, or appended to a file or pipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Final, Protocol

from google.protobuf.json_format import MessageToJson

from runahead.service.commands.stats_text import rate_line, stats_lines
from runahead.v1 import stats_pb2

# VT100 sequences, and xterm's alternate screen.
_OTHER_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
_BACK_AGAIN: Final = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class View(Protocol):
    """Shows figures."""

    def show(self, stats: stats_pb2.ServerStats) -> None:
        """Show one sample. Raises BrokenPipeError if nobody reads."""

    def end(self) -> None:
        """End the output. Idempotent."""


class JsonLines:
    """One JSON line for each sample, in protobuf's JSON with the contract's names and zeros."""

    def show(self, stats: stats_pb2.ServerStats) -> None:
        # protobuf writes 64-bit integers as strings, because not every JSON reader has such numbers.
        text = MessageToJson(
            stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
        )
        print(text, flush=True)

    def end(self) -> None:
        """Nothing to end."""


class Blocks:
    """One line for each group of figures, with an empty line between samples."""

    def __init__(self) -> None:
        self._before: stats_pb2.ServerStats | None = None

    def show(self, stats: stats_pb2.ServerStats) -> None:
        if self._before is not None:
            print()
        for line in _lines(self._before, stats):
            print(line)
        sys.stdout.flush()
        self._before = stats

    def end(self) -> None:
        """Nothing to end."""


class Screen:
    """Shows samples in place on the terminal's alternate screen.

    title: the first line.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._before: stats_pb2.ServerStats | None = None
        self._is_open = False

    def show(self, stats: stats_pb2.ServerStats) -> None:
        columns, rows = shutil.get_terminal_size()
        lines = [self._title, "", *_lines(self._before, stats)][: rows - 1]
        shown = "".join(f"{line[:columns]}{_CLEAR_LINE}\n" for line in lines)
        begin = "" if self._is_open else _OTHER_SCREEN
        self._is_open = True
        _write(begin + _HOME + shown + _CLEAR_BELOW)
        self._before = stats

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            _write(_BACK_AGAIN)


def _lines(before: stats_pb2.ServerStats | None, stats: stats_pb2.ServerStats) -> Iterator[str]:
    yield from stats_lines(stats)
    if before is not None:
        yield rate_line(before, stats)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
