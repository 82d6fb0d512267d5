"""How far a start is: a bar where people look at a terminal, lines of the log elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runahead.runtime import models
from runahead.runtime.log_output import LogOutput
from runahead.runtime.process.progress import Bar, shown_captures, shown_loading
from runahead.service.processes.children import ENGINE_COMMAND

BUNDLED = Path(models.__path__[0]) / "bundled"
ERASE = "\x1b[2K"
MIB = 1 << 20


def bar() -> tuple[io.StringIO, Bar, list[tuple[int, int]]]:
    terminal, said = io.StringIO(), list[tuple[int, int]]()
    return (
        terminal,
        Bar(terminal, "loading", lambda done, total: f"{done} of {total}", lambda *of: said.append(of)),
        said,
    )


def test_a_bar_is_one_line_drawn_over_itself_and_gone_at_the_end() -> None:
    terminal, draw, said = bar()
    for done in (1, 2, 4):
        draw(done, 4)
    drawn = terminal.getvalue()
    assert "\n" not in drawn
    assert f"{ERASE}loading [{'#' * 15}{' ' * 15}]  50 %, 2 of 4\r" in drawn
    assert drawn.endswith(f"{ERASE}loading [{'#' * 30}] 100 %, 4 of 4\r{ERASE}")
    assert said == [(4, 4)]


def test_a_bar_that_has_not_moved_is_not_drawn_again() -> None:
    terminal, draw, _ = bar()
    draw(1, 4)
    once = terminal.getvalue()
    draw(1, 4)
    assert terminal.getvalue() == once


def test_a_bar_never_breaks_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((20, 5)))
    terminal, draw, _ = bar()
    draw(1, 3)
    assert len(terminal.getvalue()) == len(ERASE) + 19 + len("\r")


@pytest.mark.parametrize("output", [LogOutput(format="json"), LogOutput(level="warning"), LogOutput()])
def test_elsewhere_each_further_tenth_and_quarter_is_a_line(output: LogOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return output != LogOutput()

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9, 9))
    with capture_logs() as events:
        loaded, captured = shown_loading(output), shown_captures(output)
        for done in range(1, 41):
            loaded(done * MIB, 40 * MIB)
            captured(done, 40)
    assert screen.getvalue() == ""
    percents = [event["percent"] for event in events if event["event"] == "loading"]
    assert percents == [*range(0, 101, 10)]
    assert [event["graphs"] for event in events if event["event"] == "capturing"] == [1, 10, 20, 30, 40]


def test_a_second_attempt_is_counted_from_its_own_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a smaller pool, so that there is more memory than when the first attempt began."""
    free = 9 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 99 * MIB))
    with capture_logs() as events:
        captured = shown_captures(LogOutput())
        for done in range(3):
            captured(done, 4)
        free = 50 * MIB
        for done in range(5):
            captured(done, 4)
            free -= MIB
    said = [(event["graphs"], event["bytes"] // MIB) for event in events if event["event"] == "capturing"]
    assert said == [(0, 0), (1, 0), (2, 0), (0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]


def started(config: dict[str, Any], log: dict[str, str], folder: Path) -> str:
    """What the engine's process writes to a terminal. Its input ends at once, and so does it when it is ready."""
    ours, theirs = pty.openpty()
    orders = {
        "socket": str(folder / "engine"),
        "parent": os.getpid(),
        "config": {"model": str(BUNDLED), "device": "cpu", **config},
        "log": log,
    }
    with subprocess.Popen(ENGINE_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(orders).encode() + b"\n")
        process.stdin.close()
        written = b"".join(pieces(ours))
        assert process.stdout.read() == b"ready cpu\n"
    os.close(ours)
    return written.decode()


def pieces(terminal: int) -> Iterator[bytes]:
    """Until nobody has the other end any more, which is an error to read."""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 1 << 16):
            yield piece


def test_the_engine_draws_a_bar_on_a_terminal_and_says_the_end_in_a_line(tmp_path: Path) -> None:
    shown = started({"num_blocks": 130, "threads": 1}, {}, tmp_path)
    assert shown.count(f"{ERASE}loading [") > 5
    assert " 100 %, " in shown and " MiB\r" in shown
    (line,) = [line for line in shown.splitlines() if "percent" in line]
    assert line.startswith(ERASE), "the bar is gone where the line begins"


def test_the_engine_draws_no_bar_where_its_lines_are_for_programs(tmp_path: Path) -> None:
    shown = started({"num_blocks": 130, "threads": 1}, {"format": "json"}, tmp_path)
    assert ERASE not in shown
    percents = [event["percent"] for event in map(json.loads, shown.splitlines()) if event["event"] == "loading"]
    assert len(percents) > 3 and percents[-1] == 100
