"""Logs of a process that serves clients: its events and its libraries'. Never logs prompts, completions or an
exception's message, which may quote a request: only its type and stack.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, Final

import structlog

from runahead.runtime.log_output import LEVELS, LogOutput, LogStream, log_to_stderr
from runahead.service.log.library_lines import LineBudget, printable

_LINES: Final = 20  # of one kind, within the time below
_WINDOW_S: Final = 60.0

log = structlog.get_logger(__name__)


class _Forward(logging.Handler):
    """Forwards libraries' log records as events, without message arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._budget = LineBudget(_LINES, _WINDOW_S)

    def emit(self, record: logging.LogRecord) -> None:
        message = printable(record.msg) if isinstance(record.msg, str) else type(record.msg).__name__
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        # Not by message: a library may have formatted a client's words into it.
        left_out = self._budget.take(f"{record.name} {error or record.levelname}")
        if left_out is None:
            return
        more = {"left_out": left_out} if left_out else {}
        structlog.get_logger(record.name).log(record.levelno, "library", message=message, error=error, **more)


class UncaughtErrors:
    """Logs uncaught exceptions of threads, event loops and interpreter callbacks."""

    def __init__(self) -> None:
        self._budget = LineBudget(_LINES, _WINDOW_S)

    def install(self) -> None:
        """Install the hooks in this process and the running event loop. Without them exceptions are printed with their
        messages.
        """
        sys.excepthook = lambda kind, error, trace: self._log("main", error, trace)
        threading.excepthook = lambda seen: self._log("thread", seen.exc_value, seen.exc_traceback)
        sys.unraisablehook = lambda seen: self._log("interpreter", seen.exc_value, seen.exc_traceback)
        asyncio.get_running_loop().set_exception_handler(self._in_loop)

    def _in_loop(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._log("event_loop", error, error.__traceback__ if error is not None else None, str(context["message"]))

    def _log(
        self, where: str, error: BaseException | None, trace: TracebackType | None, message: str | None = None
    ) -> None:
        kind = type(error).__name__
        left_out = self._budget.take(f"{where} {kind}")
        if left_out is None:
            return
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)]
        more: dict[str, Any] = {"left_out": left_out} if left_out else {}
        if message is not None:
            more["message"] = printable(message)
        log.error("uncaught", where=where, error=kind, frames=frames, **more)


def configure_logs(output: LogOutput) -> None:
    """Send this process's logs and its libraries' to standard error."""
    log_to_stderr(output)
    logging.basicConfig(level=max(LEVELS[output.level], logging.WARNING), handlers=[_Forward()], force=True)


def configure_serving_logs(output: LogOutput, library_lines: int) -> None:
    """Configure logs of a process that serves clients, from inside its event loop.

    library_lines: a descriptor that receives native code's standard error. Python's stays where it was.
    """
    own = os.dup(sys.stderr.fileno())
    os.dup2(library_lines, sys.stderr.fileno())
    os.close(library_lines)
    sys.stderr = LogStream(own)
    configure_logs(output)
    UncaughtErrors().install()
