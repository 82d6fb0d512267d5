"""Who waits costs nobody who runs: the queue finds its first without a search, and looks a prefix up once."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.runtime.scheduler.request import MAX_EVICTIONS, Request
from runahead.runtime.scheduler.waiting import WaitingQueue
from runahead.runtime.wire import prompts
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import whole

PENALISED = SamplingParams(frequency_penalty=0.5)


def request(order: int, priority: int = 0, penalised: bool = False, evictions: int = 0) -> Request:
    sampling = PENALISED if penalised else SamplingParams()
    prompt = np.array([3, 4], np.int32)
    return Request(
        1, order, f"r{order}", prompt, sampling, StoppingParams(9), 11, priority=priority, order=order,
        evictions=evictions,
    )  # fmt: skip


def empty_queue(penalty_slots: int = 0) -> WaitingQueue:
    return make_chain(penalty_slots=penalty_slots).engine.scheduler.waiting


@settings(deadline=None)
@given(asked=st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=40), dice=st.randoms())
def test_the_queue_is_in_the_order_of_rank_whoever_comes_and_goes(
    asked: list[tuple[int, bool]], dice: random.Random
) -> None:
    queue, slots = empty_queue(), empty_queue(penalty_slots=1)
    everybody = [request(order, *ask) for order, ask in enumerate(asked)]
    arriving = everybody.copy()
    dice.shuffle(arriving)  # evicted ones come back late
    gone = set(dice.sample(everybody, len(everybody) // 3))
    for one in arriving:
        queue.add(one)
        slots.add(one)
    for one in gone:
        queue.remove(one)
        slots.remove(one)
    left = sorted((one for one in everybody if one not in gone), key=lambda one: one.queue_order)
    assert list(queue) == list(slots) == left
    assert len(queue) == len(left)
    assert slots.first() is next(iter(left), None)
    assert queue.first() is next((one for one in left if not one.sampling.has_penalty), None)


def test_a_request_evicted_often_enough_waits_before_older_ones_of_its_priority() -> None:
    queue = empty_queue()
    older, often, higher = request(1), request(2, evictions=MAX_EVICTIONS), request(3, priority=1)
    for one in (older, often, higher):
        queue.add(one)
    assert list(queue) == [higher, often, older]


def test_who_does_not_wait_can_t_be_taken_away() -> None:
    queue = empty_queue()
    queue.add(request(1))
    for stranger in (request(1), request(0), request(2), request(1, penalised=True)):
        with pytest.raises(ValueError, match="does not wait"):
            queue.remove(stranger)


class Looks:
    """How often a queue order was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        rank = Request.queue_order.fget  # type: ignore[attr-defined]

        def seen(one: Request) -> object:
            self.count += 1
            return rank(one)

        monkeypatch.setattr(Request, "queue_order", property(seen))


def test_thousands_that_wait_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2, schedule=no_step, penalty_slots=1, max_queue=5000)
    chain.submit(1, [3, 4], sampling=PENALISED, max_tokens=90, ignore_eos=True)
    for handle in range(2, 4002):
        chain.submit(handle, [5, 6], sampling=PENALISED, max_tokens=3, priority=handle % 7, ignore_eos=True)
    waiting = chain.engine.scheduler.waiting
    chain.turn_until(lambda: len(waiting) == 4000)
    looks = Looks(monkeypatch)
    for _ in range(20):
        chain.engine.turn()
    assert looks.count <= 5 * 20, "each turn asks who is first, a few times"
    looks.count = 0
    chain.submit(4002, [5, 6], sampling=PENALISED, max_tokens=3, priority=3)
    tracked = chain.engine.registry.by_id("r2000")
    assert tracked is not None
    waiting.remove(tracked.request)
    waiting.add(tracked.request)
    assert looks.count <= 2 * 15, "a search in an ordered list: 12 steps for 4,000"


# ---------------------------------------------------------------- the first one's prefix

SHARED = [7 + i % 50 for i in range(48)]


def head_that_waits() -> Chain:
    """Request 3 begins with 6 cached blocks and waits for more than there are, while request 2 decodes."""
    chain = make_chain(2, schedule=no_step, num_blocks=1 + 14, max_rows=4)
    chain.submit(1, SHARED, max_tokens=2, ignore_eos=True)
    chain.run()
    chain.submit(2, [3] * 5, max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens().get(2, [])) > 10)
    chain.submit(3, [*SHARED, *[4] * 36], max_tokens=2, ignore_eos=True)
    chain.turn_until(lambda: len(chain.engine.scheduler.waiting) == 1)
    return chain


def test_a_prefix_that_waits_is_hashed_never_again_and_looked_up_at_its_end_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = head_that_waits()
    pool, hashed, looked_up = chain.engine.scheduler.pool, [0], [0]
    find = pool.find

    def counted(what: list[int], call: Any) -> Any:
        def counting(*arguments: Any) -> Any:
            what[0] += 1
            return call(*arguments)

        return counting

    chain.turn()
    monkeypatch.setattr(prompts, "sha256", counted(hashed, sha256))
    monkeypatch.setattr(pool, "find", counted(looked_up, find))
    launched = chain.ledger.launched
    while len(chain.tokens()[2]) < 35:
        chain.turn()
        assert len(chain.engine.scheduler.waiting) == 1, "it waits all the time, or this test shows nothing"
    launches = chain.ledger.launched - launched
    assert launches > 15
    assert hashed[0] <= 1 + launches // 8, "blocks that the other one fills"
    assert 0 < looked_up[0] <= 3 * launches, "the walk found 6, and the seventh may come any time"
    chain.run()
    assert chain.tokens()[3] == whole([*SHARED, *[4] * 36], 2)
    assert chain.finished()[3][0].cached_tokens == 48


def test_the_prefix_is_given_up_where_its_blocks_are_reused_meanwhile() -> None:
    """Request 4, of a higher priority, takes the cached blocks while request 3 waits with what it had found."""
    chain = head_that_waits()
    for _ in range(3):
        chain.turn()
    chain.submit(4, [9] * 70, max_tokens=3, priority=1, ignore_eos=True)
    chain.run()
    assert chain.tokens()[3] == whole([*SHARED, *[4] * 36], 2)
    assert chain.tokens()[4] == whole([9] * 70, 3)
    assert chain.finished()[3][0].cached_tokens < 48, "some were reused, or this test shows nothing"


def test_a_prefix_longer_than_a_piece_is_found_while_the_loop_goes_on() -> None:
    chain = make_chain(2, num_blocks=400, context_length=1200, max_prefill_tokens=64)
    prompt = [5 + i % 80 for i in range(1100)]
    chain.submit(1, prompt, max_tokens=2, ignore_eos=True)
    chain.run()
    chain.submit(2, prompt, max_tokens=2, ignore_eos=True)
    chain.run()
    assert chain.finished()[2][0].cached_tokens == 1096, "137 blocks, more than are looked up at a time"
    assert chain.tokens()[2] == whole(prompt, 2)


def test_blocks_are_not_kept_free_for_a_row_that_has_all_it_will_need() -> None:
    """A row takes its last block while somebody waits; the block that the other lacks comes back after that."""
    chain = make_chain(1, schedule=no_step, num_blocks=1 + 4, prefix_cache=False)
    pool, waiting = chain.engine.scheduler.pool, chain.engine.scheduler.waiting
    chain.submit(1, [3] * 5, max_tokens=12, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens().get(1))
    elsewhere = pool.allocate(1)
    chain.submit(2, [4] * 10, max_tokens=3, ignore_eos=True)
    while pool.owned < len(elsewhere) + 2:
        chain.engine.turn()
    assert len(waiting) == 1, "two blocks are not there, or this test shows nothing"
    pool.fence(elsewhere)
    pool.release(elsewhere)
    chain.engine.turn()
    assert not len(waiting)
    assert not chain.finished(), "the row still decodes"
    chain.run()
    assert chain.tokens() == {1: whole([3] * 5, 12), 2: whole([4] * 10, 3)}
