"""Callers take turns, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from runahead.service.workers.caller_turns import Turns


def run(body: Callable[[Turns, list[str]], Awaitable[None]]) -> list[str]:
    log: list[str] = []
    asyncio.run(asyncio.wait_for(body(Turns(), log), 10.0))
    return log


async def wait_for_it(turns: Turns, caller: int, log: list[str], word: str) -> asyncio.Task[None]:
    async def taken() -> None:
        await turns.take(caller)
        log.append(word)

    task = asyncio.create_task(taken())
    await asyncio.sleep(0)
    return task


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_caller_with_much_does_not_keep_out_one_with_little() -> None:
    async def body(turns: Turns, log: list[str]) -> None:
        await turns.take(1)
        tasks = [await wait_for_it(turns, 1, log, f"a{n}") for n in range(3)]
        tasks += [await wait_for_it(turns, 2, log, f"b{n}") for n in range(2)]
        assert turns.waiting == 5
        for _ in tasks:
            turns.give_back()
            await settled()
        assert turns.waiting == 0

    assert run(body) == ["a0", "b0", "a1", "b1", "a2"]


def test_who_has_stopped_waiting_gets_no_turn_and_takes_none_with_him() -> None:
    async def body(turns: Turns, log: list[str]) -> None:
        await turns.take(1)
        gone, stays = [await wait_for_it(turns, caller, log, str(caller)) for caller in (2, 3)]
        gone.cancel()
        turns.give_back()  # in the same moment: the one that has gone has not noticed yet
        await settled()
        assert gone.cancelled() and stays.done()
        turns.give_back()
        await turns.take(4)
        log.append("4")

    assert run(body) == ["3", "4"]


def test_a_turn_that_comes_as_its_caller_goes_is_given_on() -> None:
    async def body(turns: Turns, log: list[str]) -> None:
        await turns.take(1)
        gone, stays = [await wait_for_it(turns, caller, log, str(caller)) for caller in (2, 3)]
        turns.give_back()
        gone.cancel()  # its turn is there, and it has not gone on yet
        await settled()
        assert gone.cancelled() and stays.done()

    assert run(body) == ["3"]


def test_as_many_turns_as_there_are_places_go_on_at_once() -> None:
    async def body() -> None:
        turns, log = Turns(most=2), list[str]()
        await turns.take(1)
        await turns.take(1)
        third = await wait_for_it(turns, 2, log, "third")
        assert (turns.waiting, log) == (1, [])
        turns.give_back()
        await third
        assert (turns.waiting, log) == (0, ["third"])

    asyncio.run(asyncio.wait_for(body(), 10.0))


def test_work_whose_caller_has_left_keeps_its_turn_until_it_ends() -> None:
    async def body() -> None:
        turns, ends, done = Turns(), asyncio.Event(), list[str]()

        async def work() -> None:
            await ends.wait()
            done.append("work")

        leaving = asyncio.ensure_future(turns.do(1, work))
        await settled()
        leaving.cancel()
        await settled()
        behind = await wait_for_it(turns, 2, done, "behind")
        assert leaving.cancelled() and turns.waiting == 1
        ends.set()
        await behind
        assert done == ["work", "behind"]

    asyncio.run(asyncio.wait_for(body(), 10.0))
