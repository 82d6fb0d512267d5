"""Logs: one JSON object a line, on standard error. Prompts and completions are never logged."""

from __future__ import annotations

import logging
import sys
from typing import Final

import structlog

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _Forward(logging.Handler):
    """What libraries log, as events of ours. Their exceptions may quote a request: only the type is kept."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        structlog.get_logger(record.name).log(record.levelno, "library", message=record.msg, error=error)


def configure_logs(level: str) -> None:
    """Sends this process's logs, and its libraries', to standard error. level: debug, info, warning or error."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    logging.basicConfig(level=max(_LEVELS[level], logging.WARNING), handlers=[_Forward()], force=True)
