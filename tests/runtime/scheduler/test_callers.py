"""Callers share rows: each has its turn, whatever another has waiting, and at whatever priority."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from runahead.runtime.scheduler import waiting as waiting_module
from runahead.runtime.scheduler.rationing import Need, choose_victim, order_of_service, ration
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.chain import Chain, make_chain
from tests.runtime.pressure import whole
from tests.simulation.clock import Clock

DEPTHS = [0, 1, 2, 4]


def ask(
    chain: Chain, caller: str, handle: int, tokens: int, *, priority: int = 0, outranks: bool = False, length: int = 3,
    penalty: float = 0.0,
) -> None:  # fmt: skip
    prompt = np.arange(length, dtype=np.int32) % 60 + 2 + handle
    stopping = StoppingParams(tokens, ignore_eos=True)
    chain.tell(
        prepared_submit(
            handle, f"{caller}/{handle}", prompt, SamplingParams(seed=0, presence_penalty=penalty), stopping,
            block_size=chain.engine.scheduler.pool.block_size, priority=priority, caller=caller, outranks=outranks,
        )
    )  # fmt: skip


def finished(chain: Chain) -> list[int]:
    """Handles in the order in which they ended."""
    return [end.handle for output in chain.outputs() for end in output.finished]


def crowded(depth: int, clock: Clock, **options: Any) -> Chain:
    """Sixteen long requests of one caller at a high priority, four of which have all rows, and a short one of another's
    behind them."""
    chain = make_chain(depth, max_rows=4, clock=clock, **options)
    for handle in range(1, 17):
        ask(chain, "alice", handle, 100, priority=1000)
    chain.turn_until(lambda: len(chain.admitted()) == 4)
    for _ in range(10):
        chain.turn()
    ask(chain, "bob", 17, 2)
    chain.turn()
    chain.turn()
    return chain


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_caller_without_a_row_gets_one_after_a_second_of_a_caller_who_has_all(depth: int) -> None:
    clock = Clock()
    chain = crowded(depth, clock)
    for _ in range(8):
        chain.turn()
        clock.pass_by(0.125)
    assert 17 not in chain.admitted()
    assert "evicted" not in chain.engine.stats().events
    for _ in range(8):
        clock.pass_by(0.125)
        chain.turn()
    assert 17 in chain.finished()
    assert chain.engine.stats().events["evicted"].count == 1
    chain.run()
    assert chain.tokens() == {
        **{handle: whole([2 + handle, 3 + handle, 4 + handle], 100) for handle in range(1, 17)},
        17: whole([19, 20, 21], 2),
    }
    chain.check_nothing_is_left()


def test_a_row_leaves_though_the_prefix_of_another_request_is_not_looked_up_to_its_end() -> None:
    clock = Clock()
    chain = crowded(1, clock)
    chain.turn()
    waiting, other = chain.engine.scheduler.waiting, chain.engine.registry.by_id("alice/5")
    assert other is not None
    waiting._searched_for, waiting._walk = other.request, chain.engine.scheduler.holdings.walk(other.request)
    clock.pass_by(1.5)
    chain.turn_until(lambda: 17 in chain.finished(), limit=12)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_caller_that_lacks_a_penalty_slot_gets_one_whatever_else_another_has_waiting(depth: int) -> None:
    clock = Clock()
    chain = make_chain(depth, max_rows=4, penalty_slots=2, clock=clock)
    for handle in range(1, 3):
        ask(chain, "alice", handle, 100, penalty=0.5)
    for handle in range(3, 9):
        ask(chain, "alice", handle, 100)
    chain.turn_until(lambda: len(chain.admitted()) == 4)
    ask(chain, "bob", 9, 2, penalty=0.5)
    chain.turn()
    chain.turn()
    clock.pass_by(1.5)
    chain.turn_until(lambda: 9 in chain.finished(), limit=16)


@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_that_hold_all_blocks_leave_one_after_the_other_until_there_is_room(depth: int) -> None:
    """What a row gives back is not given to the rows beside it that wait for blocks, again and again."""
    clock = Clock()
    chain = crowded(depth, clock, num_blocks=20)
    chain.turn()
    clock.pass_by(1.5)
    chain.turn_until(lambda: 17 in chain.finished(), limit=24)
    chain.run()
    assert sorted(chain.finished()) == list(range(1, 18))
    assert chain.tokens()[4] == whole([6, 7, 8], 100)


def test_a_row_that_left_for_a_caller_is_not_counted_as_evicted_for_want_of_blocks() -> None:
    """Or a caller's rows would be protected soon, and leave for nobody any more."""
    clock = Clock()
    chain = crowded(1, clock)
    for handle in range(18, 26):
        chain.turn()
        clock.pass_by(1.5)
        chain.turn_until(lambda handle=handle: handle - 1 in chain.finished(), limit=12)  # type: ignore[misc]
        ask(chain, "bob", handle, 2)
        chain.turn()
    assert not any(tracked.request.evictions for tracked in chain.engine.registry.all())


def test_no_other_row_leaves_while_one_is_on_its_way() -> None:
    clock = Clock()
    chain = crowded(2, clock)
    chain.turn()
    scheduler = chain.engine.scheduler
    assert scheduler.waiting.choose_row_to_yield(clock() + 0.5, 1.0) is None
    leaves = scheduler.waiting.choose_row_to_yield(clock() + 1.0, 1.0)
    assert leaves is not None
    scheduler.rows.phase[leaves.row_slot] = RowPhase.LEAVING
    assert scheduler.waiting.choose_row_to_yield(clock() + 1.0, 1.0) is None


def test_the_queue_is_in_the_order_of_turns() -> None:
    chain = make_chain(1, max_rows=1)
    for handle, caller, length in ((1, "alice", 3), (2, "alice", 3), (3, "alice", 3), (4, "bob", 9), (5, "bob", 3)):
        ask(chain, caller, handle, 40, length=length)
    chain.turn_until(lambda: 1 in chain.admitted())
    assert [one.request_id for one in chain.engine.scheduler.waiting] == ["bob/4", "alice/2", "alice/3", "bob/5"]


def test_a_caller_s_last_row_leaves_for_nobody() -> None:
    """Two callers with a row each could otherwise take it from each other for ever."""
    clock = Clock()
    chain = make_chain(1, max_rows=1, clock=clock)
    ask(chain, "alice", 1, 60)
    chain.turn_until(lambda: 1 in chain.admitted())
    ask(chain, "bob", 2, 2)
    chain.turn()
    chain.turn()
    clock.pass_by(5.0)
    chain.run()
    assert finished(chain) == [1, 2]


def test_callers_take_turns_by_the_tokens_that_they_were_served() -> None:
    """Where there is one row: one caller's requests are five times as long as the other's."""
    chain = make_chain(1, max_rows=1)
    for place in range(3):
        ask(chain, "alice", 1 + place, 50)
    for place in range(12):
        ask(chain, "bob", 4 + place, 8)
    chain.run()
    order = ["alice" if handle < 4 else "bob" for handle in finished(chain)]
    assert order[0] == "alice"
    assert order[1:6] == ["bob"] * 5 and order[6] == "alice", "as many tokens, with their prompts"


def test_a_caller_that_comes_late_has_saved_no_turns() -> None:
    chain = make_chain(1, max_rows=1)
    for place in range(6):
        ask(chain, "alice", 1 + place, 20)
    chain.turn_until(lambda: 4 in chain.admitted())
    for place in range(6):
        ask(chain, "bob", 7 + place, 20)
    chain.run()
    order = ["alice" if handle < 7 else "bob" for handle in finished(chain)]
    assert order == ["alice"] * 4 + ["bob", "alice"] * 2 + ["bob"] * 4


@pytest.mark.parametrize("outranks", [False, True])
def test_priority_orders_within_a_caller_and_across_callers_where_it_may(outranks: bool) -> None:
    chain = make_chain(1, max_rows=1)
    ask(chain, "carol", 1, 30)
    chain.turn_until(lambda: 1 in chain.admitted())
    ask(chain, "bob", 2, 4)
    ask(chain, "alice", 3, 4, priority=1, outranks=outranks)
    ask(chain, "alice", 4, 4, priority=2, outranks=outranks)
    chain.run()
    assert finished(chain) == ([1, 4, 3, 2] if outranks else [1, 2, 4, 3])


def test_a_caller_that_outranks_another_keeps_its_rows() -> None:
    clock = Clock()
    chain = make_chain(1, max_rows=2, clock=clock)
    for handle in (1, 2, 3):
        ask(chain, "alice", handle, 30 + handle, priority=1, outranks=True)
    chain.turn_until(lambda: 2 in chain.admitted())
    ask(chain, "bob", 4, 2)
    chain.turn()
    chain.turn()
    clock.pass_by(5.0)
    chain.run()
    assert list(chain.admitted()) == [1, 2, 3, 4]
    assert "evicted" not in chain.engine.stats().events


def test_no_row_leaves_where_no_room_would_come_of_it() -> None:
    """Alice has three rows; carol's one holds so much that bob's prompt fits beside none of alice's rows."""
    clock = Clock()
    chain = make_chain(1, max_rows=6, num_blocks=41, context_length=512, clock=clock)
    size = chain.engine.scheduler.pool.block_size
    ask(chain, "carol", 1, 40, length=14 * size)
    for handle in (2, 3, 4):
        ask(chain, "alice", handle, 40, length=2 * size)
    chain.turn_until(lambda: len(chain.admitted()) == 4)
    ask(chain, "bob", 5, 2, length=24 * size)
    for _ in range(8):
        chain.turn()
        clock.pass_by(1.0)
    assert "evicted" not in chain.engine.stats().events
    chain.run()
    assert sorted(chain.finished()) == [1, 2, 3, 4, 5]
    assert "evicted" not in chain.engine.stats().events


def test_a_row_leaves_for_a_prompt_of_which_the_rows_that_stay_hold_the_beginning() -> None:
    clock = Clock()
    chain = make_chain(1, max_rows=6, num_blocks=41, context_length=512, clock=clock)
    size = chain.engine.scheduler.pool.block_size
    ask(chain, "carol", 1, 70, length=24 * size)
    chain.turn_until(lambda: chain.engine.scheduler.pool.findable >= 24)
    for handle in (2, 3, 4):
        ask(chain, "alice", handle, 70, length=3 * size)
    chain.turn_until(lambda: len(chain.admitted()) == 4)
    prompt = np.arange(28 * size, dtype=np.int32) % 60 + 3
    chain.tell(
        prepared_submit(
            5, "bob/5", prompt, SamplingParams(seed=0), StoppingParams(2, ignore_eos=True), block_size=size,
            caller="bob", outranks=False,
        )
    )  # fmt: skip
    chain.turn()
    chain.turn()
    clock.pass_by(1.5)
    chain.turn_until(lambda: 5 in chain.finished(), limit=40)
    assert "evicted" in chain.engine.stats().events


def test_a_caller_that_has_lost_its_last_row_waits_from_then_on() -> None:
    clock = Clock()
    chain = make_chain(1, max_rows=3, clock=clock)
    ask(chain, "bob", 1, 100)
    for handle in (2, 3):
        ask(chain, "alice", handle, 100)
    chain.turn_until(lambda: len(chain.admitted()) == 3)
    clock.pass_by(9.0)
    ask(chain, "carol", 4, 100, priority=1, outranks=True)
    chain.turn()
    scheduler = chain.engine.scheduler
    lost = chain.engine.registry.by_id("bob/1")
    assert lost is not None
    scheduler.evict(lost.request)
    chain.turn_until(lambda: 4 in chain.admitted())
    chain.turn()
    clock.pass_by(0.5)
    chain.turn()
    assert chain.engine.stats().events["evicted"].count == 1
    clock.pass_by(0.75)
    chain.turn()
    assert chain.engine.stats().events["evicted"].count == 2


@pytest.mark.parametrize("asking", [("alice", "bob"), ("bob", "alice")], ids="-".join)
def test_a_caller_that_always_has_a_request_saves_up_no_turns(asking: tuple[str, str]) -> None:
    """Alice has had a row all along, and was served little; bob was served much. Then both want more."""
    chain = make_chain(1, max_rows=4, context_length=512)
    ask(chain, "alice", 1, 400)
    for place in range(12):
        ask(chain, "bob", 2 + place, 60 if place < 9 else 5)
    chain.turn_until(lambda: 13 in chain.admitted())
    for place in range(12):
        ask(chain, asking[0], 20 + place, 10)
    for place in range(12):
        ask(chain, asking[1], 40 + place, 10)
    chain.run()
    order = [asking[handle // 40] for handle in finished(chain) if handle >= 20]
    assert 4 <= order[:12].count("alice") <= 6


def test_a_prefill_that_is_computed_again_is_charged_once() -> None:
    chain = make_chain(1, max_rows=2, num_blocks=200, prefix_cache=False)
    scheduler = chain.engine.scheduler
    ask(chain, "alice", 1, 30, length=100)
    ask(chain, "bob", 2, 30)
    served = list[int]()

    def look() -> int:
        served.append(scheduler.holdings.callers.served(["alice"])["alice"])
        return served[-1]

    chain.turn_until(lambda: 1 in chain.admitted() and look() > 0)
    assert served[-1] < 100
    tracked = chain.engine.registry.by_id("alice/1")
    assert tracked is not None
    scheduler.evict(tracked.request)
    chain.turn_until(lambda: look() >= 101)
    assert max(served) <= 104
    assert served == sorted(served)
    assert scheduler.tally.counters["recomputed_tokens"]


def request(order: int, caller: str, priority: int = 0, *, outranks: bool = False, evictions: int = 0) -> Request:
    prompt = np.array([3, 4], np.int32)
    return Request(
        1, order, f"r{order}", prompt, SamplingParams(), StoppingParams(9), 11, priority=priority, order=order,
        caller=caller, outranks=outranks, evictions=evictions,
    )  # fmt: skip


def test_rows_of_callers_are_served_in_turn_and_the_youngest_of_who_holds_most_leaves_first() -> None:
    rows = [request(1, "alice"), request(2, "alice"), request(3, "alice", 9), request(4, "bob"), request(5, "bob")]
    keys = order_of_service(rows)
    assert [one.order for one in sorted(rows, key=keys.__getitem__)] == [3, 4, 1, 5, 2]
    shortage = ration([Need(one, 1) for one in rows], 2, keys)
    assert shortage is not None
    assert [one.order for one in shortage.waiting] == [1, 5, 2]
    assert choose_victim(ration([Need(one, 1) for one in rows], 0, keys) or shortage, rows) is rows[1]


def test_a_need_is_served_by_the_place_of_its_row_among_all_that_run() -> None:
    """Rows of its caller that need nothing count, too."""
    rows = [request(1, "alice"), request(2, "alice"), request(3, "bob")]
    shortage = ration([Need(rows[1], 1), Need(rows[2], 1)], 1, order_of_service(rows))
    assert shortage is not None
    assert shortage.waiting == (rows[1],)


def test_a_protected_row_is_served_before_other_callers_rows_unless_these_outrank_it() -> None:
    bob = [request(order, "bob", evictions=3) for order in (2, 3)]
    rows = [request(1, "alice"), *bob, request(4, "carol", 1, outranks=True)]
    keys = order_of_service(rows)
    assert [one.order for one in sorted(rows, key=keys.__getitem__)] == [4, 2, 3, 1]


def test_a_turn_in_which_nobody_comes_or_goes_looks_at_no_caller_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(), Counter[str]()
    chain = make_chain(1, max_rows=2, clock=clock)
    for handle in range(1, 3):
        ask(chain, f"caller {handle}", handle, 100)
    chain.turn_until(lambda: len(chain.admitted()) == 2)
    for handle in range(3, 40):
        ask(chain, f"caller {handle}", handle, 2)
    waiting = chain.engine.scheduler.waiting
    chain.turn_until(lambda: len(waiting._without_row) == 37)
    of_first = waiting_module._service_key

    def turn_of(request: Request, has_row: bool, served: int) -> Any:
        looks["first"] += 1
        return of_first(request, has_row, served)

    class Counted(dict[str, float]):
        def setdefault(self, caller: str, now_s: float) -> float:
            looks["lacks"] += 1
            return super().setdefault(caller, now_s)

    waiting._without_row = Counted(waiting._without_row)
    monkeypatch.setattr(waiting_module, "_service_key", turn_of)
    for _ in range(4):
        clock.pass_by(1.0)
        chain.turn()
    assert not looks
    ask(chain, "caller 40", 40, 2)
    chain.turn()
    chain.turn()
    assert looks == {"lacks": 1}
