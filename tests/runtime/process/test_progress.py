"""How far a start is, in lines of the log."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runahead.runtime import models
from runahead.runtime.process.progress import shown_captures, shown_loading
from runahead.service.processes.children import ENGINE_COMMAND

BUNDLED = Path(models.__path__[0]) / "bundled"
MIB = 1 << 20


def test_each_further_tenth_and_quarter_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9, 9))
    with capture_logs() as events:
        loaded, captured = shown_loading(), shown_captures()
        for done in range(1, 41):
            loaded(done * MIB, 40 * MIB)
            captured(done, 40)
    percents = [event["percent"] for event in events if event["event"] == "loading"]
    assert percents == [*range(0, 101, 10)]
    assert [event["graphs"] for event in events if event["event"] == "capturing"] == [1, 10, 20, 30, 40]


def test_a_second_attempt_is_counted_from_its_own_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a smaller pool, so that there is more memory than when the first attempt began."""
    free = 9 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 99 * MIB))
    with capture_logs() as events:
        captured = shown_captures()
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


def test_the_engine_logs_its_progress_to_a_terminal_too(tmp_path: Path) -> None:
    shown = started({"num_blocks": 130, "threads": 1}, {"format": "json"}, tmp_path)
    percents = [event["percent"] for event in map(json.loads, shown.splitlines()) if event["event"] == "loading"]
    assert len(percents) > 3 and percents[-1] == 100
