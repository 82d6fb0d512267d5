"""Figures on standard output: in place on a terminal, or one after the other for a file, a pipe or a script."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Final, Protocol

from google.protobuf.json_format import MessageToJson

from runahead.service.commands.stats_text import rate_line, stats_lines
from runahead.v1 import stats_pb2

# What terminals understand since the VT100, and xterm's other screen, which is gone when one goes back.
_OTHER_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
_BACK_AGAIN: Final = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class View(Protocol):
    """Where figures are shown."""

    def show(self, stats: stats_pb2.ServerStats) -> None:
        """Those of one moment. Raises BrokenPipeError where nobody reads any more."""

    def end(self) -> None:
        """Nothing follows. Idempotent."""


class JsonLines:
    """Each time one line, as protobuf writes JSON, under the contract's names, zeros included."""

    def show(self, stats: stats_pb2.ServerStats) -> None:
        # 64 bits are text in it, which is protobuf's rule: not every reader of JSON has numbers of that size.
        text = MessageToJson(
            stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
        )
        print(text, flush=True)

    def end(self) -> None:
        """Nothing is left open."""


class Blocks:
    """Each time a line for each group of figures, with an empty line between one time and the next."""

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
        """Nothing is left open."""


class Screen:
    """In place, on a screen of the terminal's own: what stood there before is there again afterwards.

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
