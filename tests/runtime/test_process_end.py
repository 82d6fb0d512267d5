"""The words for how a process has ended."""

from __future__ import annotations

import signal

import pytest

from runahead.runtime.process_end import described, end_fields


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (2, "exit code 2"), (-signal.SIGBUS, "signal SIGBUS"), (-40, "signal 40")],
)
def test_a_signal_is_named(code: int, words: str) -> None:
    assert described(code) == words


def test_a_line_of_the_log_has_both() -> None:
    assert end_fields(1) == {"exit_code": 1}
    assert end_fields(-9) == {"exit_code": -9, "signal": "SIGKILL"}
