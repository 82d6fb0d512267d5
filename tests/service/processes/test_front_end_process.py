"""A front end as a child process: its orders, its words, its silence, its end."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes import children
from runahead.service.processes.children import FrontEndOrders, FrontEndProcess, FrontEndStartError
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board

TIMEOUT_S = 30.0
STOPS = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"
LOADS = "import json, sys, threading\norders = json.loads(sys.stdin.readline())\nprint('loaded', flush=True)\n"
SERVES = LOADS + "order = json.loads(sys.stdin.readline())\nprint('ready', order['port'] + 1, flush=True)\n"


def run(tmp_path: Path, program: str, body: Callable[[FrontEndProcess], Awaitable[None]]) -> None:
    """Starts a front end that is this program, and ends it."""

    async def started() -> None:
        with tempfile.TemporaryFile() as memory:
            memory.truncate(Board.size(1))
            orders = FrontEndOrders(
                engine=EngineConfig(model="x"),
                settings=FrontEndSettings(),
                index=0,
                board=memory.fileno(),
                version="1",
                linger_s=0.0,
            )
            (tmp_path / "front_end.py").write_text(program)
            async with asyncio.timeout(TIMEOUT_S):
                front_end = await FrontEndProcess.start(orders, [sys.executable, str(tmp_path / "front_end.py")])
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await body(front_end)
            finally:
                await front_end.kill()

    asyncio.run(started())


def test_it_serves_where_it_is_told_to_and_says_so_and_ends_when_it_is_told(tmp_path: Path) -> None:
    async def body(front_end: FrontEndProcess) -> None:
        assert await front_end.serve(Path("/socket"), 7) == 8
        front_end.drain()
        assert await front_end.wait() == 5

    run(tmp_path, SERVES + "sys.exit(5 if sys.stdin.readline() == 'drain\\n' else 6)", body)


def test_one_that_says_now_and_again_that_it_lives_is_not_stuck_and_one_that_stops_saying_so_is(tmp_path: Path) -> None:
    async def body(front_end: FrontEndProcess) -> None:
        await front_end.serve(Path("/socket"), 7)
        stuck = asyncio.ensure_future(front_end.wait_stuck(1.0))
        front_end.drain()
        await asyncio.wait({stuck}, timeout=2.0)
        assert not stuck.done(), "it has lived for twice as long as it may be silent"
        front_end.end()
        await stuck

    alive = """
def beat():
    while not silent.wait(0.05):
        print("alive", flush=True)
silent = threading.Event()
threading.Thread(target=beat, daemon=True).start()
sys.stdin.readline()
sys.stdin.readline()
silent.set()
threading.Event().wait()
"""
    run(tmp_path, SERVES + alive, body)


def test_a_supervisor_that_was_stopped_does_not_take_a_front_end_for_stuck(tmp_path: Path) -> None:
    async def body(front_end: FrontEndProcess) -> None:
        loop, stopped_s = asyncio.get_running_loop(), 0.0
        awake = loop.time
        loop.time = lambda: awake() + stopped_s  # type: ignore[method-assign]
        stuck = asyncio.ensure_future(front_end.wait_stuck(4.0))
        for _ in range(3):
            stopped_s += 6.0
            for _ in range(10):
                await asyncio.sleep(0)
        assert not stuck.done()
        stuck.cancel()

    run(tmp_path, LOADS + STOPS, body)


def test_one_that_has_ended_is_not_stuck(tmp_path: Path) -> None:
    async def body(front_end: FrontEndProcess) -> None:
        stuck = asyncio.ensure_future(front_end.wait_stuck(0.05))
        assert await front_end.wait() == 3
        await asyncio.wait({stuck}, timeout=0.5)
        assert not stuck.done()
        stuck.cancel()

    run(tmp_path, LOADS + "sys.exit(3)", body)


@pytest.mark.parametrize("program", ["import sys; sys.exit(2)", "print('hello')\nimport sys; sys.exit(2)"])
def test_one_that_ends_before_it_has_loaded_gives_its_exit_code(tmp_path: Path, program: str) -> None:
    async def nothing(front_end: FrontEndProcess) -> None:
        raise AssertionError("it has started")

    with pytest.raises(FrontEndStartError) as failed:
        run(tmp_path, program, nothing)
    assert failed.value.exit_code == 2


@pytest.mark.parametrize("program", [STOPS, LOADS + STOPS], ids=["loading", "serving"])
def test_one_that_hangs_while_it_starts_is_ended_and_has_not_started(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either step of a start. It is stopped by a signal, so that nothing but a kill ends it."""
    served: list[FrontEndProcess] = []
    monkeypatch.setattr(children, "START_S", 2.0)

    async def body(front_end: FrontEndProcess) -> None:
        served.append(front_end)
        await front_end.serve(Path("/socket"), 7)

    with pytest.raises(FrontEndStartError, match="said nothing for 2 s") as failed:
        run(tmp_path, program, body)
    assert failed.value.exit_code is None
    assert [front_end._process.returncode for front_end in served] == [-9] * (program != STOPS)
