"""What a front end in this process logs, as it comes."""

from __future__ import annotations

import queue
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from tests.service.fake_engine import TIMEOUT_S

Line = dict[str, Any]


class LogLines:
    """Lines of every thread, each once, in the order in which they were written."""

    def __init__(self) -> None:
        self._lines: queue.Queue[Line] = queue.Queue()

    def next(self, event: str) -> Line:
        """The next line of an event. Those before it are passed over."""
        while True:
            line = self._lines.get(timeout=TIMEOUT_S)
            if line["event"] == event:
                return line

    def call(self, method: str) -> Line:
        """The line of the next call of a method."""
        while True:
            line = self.next("call")
            if line["method"].endswith(f"/{method}"):
                return line

    def rest(self) -> list[Line]:
        """All that were written and not looked at."""
        return [self._lines.get_nowait() for _ in range(self._lines.qsize())]

    def _take(self, _: object, level: str, line: MutableMapping[str, Any]) -> Any:
        self._lines.put({"level": level, **line})
        raise structlog.DropEvent


@contextmanager
def log_lines() -> Iterator[LogLines]:
    """Takes what is logged in the body, from level debug on."""
    lines, before = LogLines(), structlog.get_config()
    structlog.configure(processors=[lines._take])
    try:
        yield lines
    finally:
        structlog.configure(**before)
