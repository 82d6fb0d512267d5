"""Callers take turns at a few threads, however much each of them has waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from runahead.service.workers.caller_turns import TurnPool

TIMEOUT_S = 10.0


class Steps:
    """Work of some turns, each of which writes a word into a log and then waits until it may end."""

    def __init__(self, log: list[str], word: str, turns: int = 1, *, is_long: bool = False) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.begun = threading.Event()
        self.is_long = is_long
        self._log, self._word, self._turns = log, word, turns

    def turn(self) -> bool:
        self._log.append(self._word)
        self.begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        self._turns -= 1
        return self._turns == 0


def held_up(log: list[str], word: str, *, is_long: bool = False) -> Steps:
    work = Steps(log, word, is_long=is_long)
    work.may_end.clear()
    return work


def run(body: Callable[[TurnPool, list[str]], Awaitable[None]], threads: int = 2) -> None:
    async def started() -> None:
        pool = TurnPool(threads, "test")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await body(pool, [])
        finally:
            pool.close()

    asyncio.run(started())


async def until(condition: Callable[[], bool]) -> None:
    for _ in iter(condition, True):
        await asyncio.sleep(0)


@contextmanager
def one_thread_left(pool: TurnPool) -> Iterator[None]:
    """All but one thread are busy with something else."""
    work = held_up([], "")
    task = asyncio.ensure_future(pool.do(-1, work))
    try:
        yield
    finally:
        work.may_end.set()
        assert not task.done()


def test_callers_take_turns_whoever_came_first_and_however_much_they_have() -> None:
    async def body(pool: TurnPool, log: list[str]) -> None:
        with one_thread_left(pool):
            first = held_up(log, "first")
            tasks = [asyncio.ensure_future(pool.do(9, first))]
            await until(first.begun.is_set)
            for caller, works in ((1, [("a", 3), ("b", 2)]), (2, [("c", 2)]), (3, [("d", 1)])):
                tasks += [asyncio.ensure_future(pool.do(caller, Steps(log, *work))) for work in works]
            await until(lambda: pool.waiting == 4)
            first.may_end.set()
            await asyncio.gather(*tasks)
        assert log == ["first", "a", "c", "d", "a", "c", "a", "b", "b"], "of a caller the oldest goes on first"

    run(body)


def test_one_caller_alone_has_all_threads() -> None:
    async def body(pool: TurnPool, log: list[str]) -> None:
        works = [held_up(log, "x") for _ in range(3)]
        tasks = [asyncio.ensure_future(pool.do(1, work)) for work in works]
        await until(lambda: log == ["x", "x"])
        assert pool.waiting == 1
        for work in works:
            work.may_end.set()
        await asyncio.gather(*tasks)

    run(body)


def test_long_turns_leave_a_thread_for_others_whosever_they_are() -> None:
    async def body(pool: TurnPool, log: list[str]) -> None:
        long = [held_up(log, "long", is_long=True) for _ in range(3)]
        tasks = [asyncio.ensure_future(pool.do(caller, work)) for caller, work in enumerate(long)]
        await until(lambda: log == ["long"])
        for caller in (0, 7):
            await pool.do(caller + 10, Steps(log, "short"))
        assert log == ["long", "short", "short"]
        for work in long:
            work.may_end.set()
        await asyncio.gather(*tasks)
        assert log.count("long") == 3

    run(body)


def test_a_long_turn_waits_behind_none_of_its_caller_s_short_ones_while_others_wait_for_its_place() -> None:
    async def body(pool: TurnPool, log: list[str]) -> None:
        with one_thread_left(pool):
            first = held_up(log, "first")
            tasks = [asyncio.ensure_future(pool.do(9, first))]
            await until(first.begun.is_set)
            for caller, word, is_long in (*((1, "short", False),) * 6, (1, "long of 1", True), (2, "long of 2", True)):
                tasks.append(asyncio.ensure_future(pool.do(caller, Steps(log, word, is_long=is_long))))
            await until(lambda: pool.waiting == 8)
            first.may_end.set()
            await asyncio.gather(*tasks)
            assert log.index("long of 2") < 5, log

    run(body)


def test_who_waits_no_more_gets_no_further_turn_and_holds_nobody_up() -> None:
    async def body(pool: TurnPool, log: list[str]) -> None:
        with one_thread_left(pool):
            begun, waiting = held_up(log, "begun"), Steps(log, "waiting", 5)
            begun._turns = 1000
            tasks = [asyncio.ensure_future(pool.do(1, begun)), asyncio.ensure_future(pool.do(2, waiting))]
            await until(lambda: begun.begun.is_set() and pool.waiting == 1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert pool.waiting == 0
            begun.may_end.set()
            await pool.do(3, Steps(log, "other", 2))
            assert log == ["begun", "other", "other"]

    run(body)


def test_a_turn_that_raises_ends_its_work_alone() -> None:
    class Broken:
        is_long = False

        def turn(self) -> bool:
            raise ValueError("broken")

    async def body(pool: TurnPool, log: list[str]) -> None:
        with pytest.raises(ValueError, match="broken"):
            await pool.do(1, Broken())
        await pool.do(1, Steps(log, "x", 2))
        assert log == ["x", "x"]

    run(body)
