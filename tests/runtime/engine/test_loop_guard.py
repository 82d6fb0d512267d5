"""A loop that stands still stops its process, with stacks; one that turns is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

from runahead.runtime import models
from runahead.runtime.watchdog import LoopGuard

BUNDLED = Path(models.__path__[0]) / "bundled"
STANDING = """
import sys, threading, runahead.runtime.engine.loop, runahead.runtime.process.main as process
def stand(engine): threading.Event().wait()
runahead.runtime.engine.loop.Engine.turn = stand
process._TURN_S = 0.0
sys.exit(process.main())
"""


def test_a_loop_that_stands_still_is_stopped_once() -> None:
    stopped = threading.Semaphore(0)
    guard = LoopGuard(lambda: 7, 0.01, stopped.release)
    guard.start()
    assert stopped.acquire(timeout=30)
    guard.end()
    assert not stopped.acquire(blocking=False)


def test_a_loop_that_turns_is_left_alone() -> None:
    turns, looks, stopped = count(), threading.Semaphore(0), threading.Event()

    def turn() -> int:
        looks.release()
        return next(turns)

    guard = LoopGuard(turn, 0.001, stopped.set)
    guard.start()
    for _ in range(20):
        assert looks.acquire(timeout=30)
    guard.end()
    assert not stopped.is_set()


def test_an_engine_whose_loop_stands_still_ends_with_the_stacks_of_its_threads(tmp_path: Path) -> None:
    config = {"model": str(BUNDLED), "device": "cpu", "launch_timeout_s": 0.3, "num_blocks": 130, "threads": 1}
    orders = json.dumps({"socket": str(tmp_path / "engine.sock"), "parent": os.getpid(), "config": config})
    with subprocess.Popen(
        [sys.executable, "-c", STANDING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdin is not None and engine.stderr is not None
        engine.stdin.write(orders + "\n")
        engine.stdin.flush()
        log = engine.stderr.read()
        assert engine.wait(timeout=60) == 1
    assert "loop_hung" in log
    assert "in stand" in log
