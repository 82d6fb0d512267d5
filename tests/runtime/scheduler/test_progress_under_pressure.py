"""However little memory there is: everybody gets on, and nobody is evicted for ever."""

from __future__ import annotations

import random
from functools import partial

import pytest

from runahead.runtime.scheduler.request import MAX_EVICTIONS
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import events, request_of, whole

DEPTHS = [0, 1, 2, 4]
BLOCKS = 8  # of 8 tokens: hardly more than the longest request needs
REQUESTS = 9


def ask(chain: Chain, handle: int, length: int, count: int, priority: int = 0) -> None:
    chain.submit(handle, [handle % 90 + 2] * length, max_tokens=count, ignore_eos=True, priority=priority)


def check_all(chain: Chain, asked: dict[int, tuple[int, int]]) -> None:
    chain.check_nothing_is_left()
    for handle, (length, count) in asked.items():
        assert chain.tokens()[handle] == whole([handle % 90 + 2] * length, count)
        assert len(chain.finished()[handle]) == 1


def run_with_progress(chain: Chain, idle_launches: int) -> None:
    """Run; no more than so many launches in a row bring neither a token nor a chunk."""
    last, since = (0, 0), 0
    for _ in range(100_000):
        chain.turn()
        counters = chain.engine.scheduler.tally.counters
        work = (counters["generated_tokens"], counters["prefill_chunks"])
        if work != last:
            last, since = work, chain.ledger.launched
        assert chain.ledger.launched - since <= idle_launches, "launches, and nobody comes any further"
        if chain.quiet:
            return
    raise AssertionError("no end")


# ---------------------------------------------------------------- mixes

MIXES = {
    "short prompts that grow": lambda dice: (dice.randint(1, 8), dice.randint(30, 50)),
    "long prompts that end soon": lambda dice: (dice.randint(40, 60), dice.randint(1, 4)),
    "all as long as the pool": lambda dice: (dice.randint(1, 40), 0),
    "anything": lambda dice: (dice.randint(1, 60), dice.randint(1, 50)),
}


def some(mix: str, dice: random.Random, requests: int) -> dict[int, tuple[int, int]]:
    asked = {}
    for handle in range(1, requests + 1):
        length, count = MIXES[mix](dice)
        room = BLOCKS * 8 - length + 1
        asked[handle] = (length, min(count or room, room))
    return asked


@pytest.mark.parametrize("priorities", [(0,), (0, 0, 1, 2)], ids=["equal", "by priority"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_there_is_no_thrash(depth: int, mix: str, priorities: tuple[int, ...]) -> None:
    dice = random.Random(f"{mix} {depth}")
    asked = some(mix, dice, REQUESTS)
    chain = make_chain(depth, schedule=seeded_schedule(depth), num_blocks=1 + BLOCKS)
    for handle, (length, count) in asked.items():
        ask(chain, handle, length, count, dice.choice(priorities))
        if dice.random() < 0.5:
            chain.turn()
    # A launch that brings nothing is one in which all wait for blocks that those in flight give back.
    run_with_progress(chain, idle_launches=2 * depth + 4)
    check_all(chain, asked)
    if priorities == (0,):
        assert events(chain, "evicted") <= MAX_EVICTIONS * len(asked)
        # At worst nobody runs beside another, and each is computed again after every eviction.
        alone = sum(length // 16 + 1 + count for length, count in asked.values())
        assert chain.ledger.launched <= (1 + MAX_EVICTIONS) * alone


def test_these_mixes_run_out_of_blocks() -> None:
    evicted = paused = 0
    for mix in MIXES:
        chain = make_chain(2, num_blocks=1 + BLOCKS)
        for handle, (length, count) in some(mix, random.Random(f"{mix} 2"), REQUESTS).items():
            ask(chain, handle, length, count)
        chain.run()
        evicted += events(chain, "evicted")
        paused += events(chain, "paused")
    assert evicted >= 10
    assert paused >= 10


# ---------------------------------------------------------------- evicted for the last time


def was_evicted(chain: Chain, times: int) -> bool:
    return request_of(chain, 1).evictions == times


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_evicted_as_often_as_may_be_is_spared_whoever_comes_after_it(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + BLOCKS)
    scheduler = chain.engine.scheduler
    ask(chain, 1, 5, 40)
    for times in range(1, MAX_EVICTIONS + 1):
        chain.turn_until(lambda: chain.is_running("r1"))
        chain.turn()
        scheduler.evict(request_of(chain, 1))
        chain.turn_until(partial(was_evicted, chain, times))
    assert request_of(chain, 1).is_protected
    chain.turn_until(lambda: chain.is_running("r1"))
    asked = {1: (5, 40)}
    for handle in range(2, 9):
        asked[handle] = (6 + handle % 3, 30)
        ask(chain, handle, *asked[handle])
        chain.turn()
    request = request_of(chain, 1)
    chain.run()
    assert request.evictions == MAX_EVICTIONS
    assert events(chain, "evicted") > MAX_EVICTIONS, "others were evicted beside it"
    check_all(chain, asked)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_evicted_as_often_as_may_be_comes_back_when_all_fit_at_their_longest(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 15, prefix_cache=False)
    ask(chain, 1, 8, 89)  # twelve blocks at its longest
    ask(chain, 2, 8, 24)  # four
    chain.turn()
    request = request_of(chain, 2)
    request.evictions = MAX_EVICTIONS - 1
    chain.engine.scheduler.evict(request)
    chain.turn_until(lambda: request.evictions == MAX_EVICTIONS)
    assert chain.engine.scheduler.pool.available > 10
    while not chain.finished():
        assert request in chain.engine.scheduler.waiting, "it might lack a block as long as the other runs"
        chain.turn()
    chain.run()
    assert request.evictions == MAX_EVICTIONS
    check_all(chain, {1: (8, 89), 2: (8, 24)})


@pytest.mark.parametrize("depth", DEPTHS)
def test_who_was_evicted_comes_back_only_with_more_room_than_before(depth: int) -> None:
    """One block more each time, then three: it is not evicted again by the next border of its neighbour."""
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + BLOCKS, prefix_cache=False)
    ask(chain, 1, 8, 50)
    ask(chain, 2, 8, 50)
    chain.run()
    assert 0 < events(chain, "evicted") <= MAX_EVICTIONS
    assert events(chain, "readmitted") == events(chain, "evicted")
    check_all(chain, {1: (8, 50), 2: (8, 50)})
