"""Sends this process's logs to standard error: text on a terminal, otherwise one JSON object a line.

Front end and engine share one standard error. Prompts and completions are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal

import msgspec
import structlog

from runahead.runtime.log_stream import stream_stderr

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

LEVELS: Final[dict[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class LogOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Log settings.
    level: the least severe logged event: debug, info, warning or error.

    format: console (text), json (one object a line), or auto: console if standard error is a terminal.
    """

    level: Level = "info"
    format: Format = "auto"


def draws_on_a_terminal(output: LogOutput) -> bool:
    """Whether lines may be redrawn in place: standard error is a terminal, and info is logged."""
    return sys.stderr.isatty() and output.format != "json" and LEVELS[output.level] <= logging.INFO


def log_to_stderr(output: LogOutput) -> None:
    """Send this process's events to standard error from now on. Writes then neither block nor raise."""
    stream_stderr()
    on_terminal = sys.stderr.isatty()
    for_people = output.format == "console" or (output.format == "auto" and on_terminal)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *(_for_people(on_terminal) if for_people else _as_json()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[output.level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def _as_json() -> list[structlog.typing.Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]


def _fit_to_be_seen(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace control characters in an event's texts, which clients may choose, so that the event stays one line. JSON
    escapes them itself.
    """
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def printable(text: str) -> str:
    """Replace unprintable characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _for_people(colors: bool) -> list[structlog.typing.Processor]:
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _fit_to_be_seen,
        # A plain traceback: the renderer's shows local variables, and prompts with them.
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]
