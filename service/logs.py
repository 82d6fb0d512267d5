"""Logs of the front end: its own events, and what its libraries log. Prompts and completions are never logged."""

from __future__ import annotations

import logging

import structlog

from runahead.runtime.log_output import LEVELS, LogOutput, log_to_stderr


class _Forward(logging.Handler):
    """What libraries log, as events of ours. Their exceptions may quote a request: only the type is kept."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        structlog.get_logger(record.name).log(record.levelno, "library", message=record.msg, error=error)


def configure_logs(output: LogOutput) -> None:
    """Sends this process's logs, and its libraries', to standard error."""
    log_to_stderr(output)
    logging.basicConfig(level=max(LEVELS[output.level], logging.WARNING), handlers=[_Forward()], force=True)
