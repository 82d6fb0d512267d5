"""Where this process's logs go: standard error, for people on a terminal and as one JSON object a line elsewhere.

The front end and the engine share one standard error, and write to it alike. Prompts and completions are never logged.
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
    """level: the least severe event that is logged: debug, info, warning or error.

    format: console (for people), json (one object a line), or auto: console where standard error is a terminal.
    """

    level: Level = "info"
    format: Format = "auto"


def draws_on_a_terminal(output: LogOutput) -> bool:
    """Whether a line may be drawn over itself: people look at standard error, and at what goes well too."""
    return sys.stderr.isatty() and output.format != "json" and LEVELS[output.level] <= logging.INFO


def log_to_stderr(output: LogOutput) -> None:
    """Sends this process's events to standard error, from now on. No write there blocks or raises any more."""
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
    """A terminal acts on some characters, and clients choose some words of events. Whatever is in an event's texts, it
    is one line, in which such characters have a mark instead. JSON writes them as numbers by itself."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def printable(text: str) -> str:
    """The text with a mark for each character that is none to be seen."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _for_people(colors: bool) -> list[structlog.typing.Processor]:
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _fit_to_be_seen,
        # A plain traceback: the renderer's own one shows local variables, and prompts with them.
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]
