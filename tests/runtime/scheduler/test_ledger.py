"""The ledger's rules, on launches without rows."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.runtime.scheduler.ledger import Launch, Ledger, LedgerError

FAR = sys.maxsize


def launch(number: int, prompt_tokens: int = 0, calls: int = 1, samples: bool = True) -> Launch:
    slots, epochs, flags = np.zeros(1, np.int32), np.zeros(1, np.int64), np.array([samples])
    shape = LaunchShape(number, 1, Form.PLAIN, 1, max(1, prompt_tokens), is_decode=not prompt_tokens)
    return Launch(shape, slots, epochs, flags, slots, epochs, flags, prompt_tokens=prompt_tokens, calls=calls)


def make(run_ahead: int = 2, tokens: int = 512) -> Ledger[str]:
    return Ledger(run_ahead, tokens)


def test_launches_are_enqueued_in_order() -> None:
    ledger = make()
    ledger.enqueue(launch(1))
    with pytest.raises(LedgerError, match="launch 3 was enqueued after launch 1"):
        ledger.enqueue(launch(3))


def test_launches_commit_in_order_and_never_before_they_are_enqueued() -> None:
    ledger = make()
    ledger.enqueue(launch(1))
    with pytest.raises(LedgerError):
        ledger.commit(2)
    ledger.commit(1)
    with pytest.raises(LedgerError):
        ledger.commit(2)
    with pytest.raises(LedgerError):
        ledger.next_to_commit()


def test_an_end_mark_never_goes_back_nor_ahead() -> None:
    ledger = make()
    ledger.enqueue(launch(1))
    with pytest.raises(LedgerError):
        ledger.end(2)
    ledger.end(1)
    with pytest.raises(LedgerError):
        ledger.end(0)


def test_a_launch_retires_when_it_is_committed_and_has_ended() -> None:
    ledger = make()
    ledger.enqueue(launch(1))
    ledger.enqueue(launch(2))
    ledger.commit(1)
    assert ledger.retire() == []
    ledger.end(1)
    assert [gone.number for gone in ledger.retire()] == [1]
    ledger.end(2)
    assert ledger.retire() == []
    ledger.commit(2)
    assert [gone.number for gone in ledger.retire()] == [2]
    assert ledger.in_flight == 0


@pytest.mark.parametrize("run_ahead", [1, 2, 3, 4])
def test_there_is_room_for_as_many_uncommitted_launches_as_the_depth(run_ahead: int) -> None:
    ledger = make(run_ahead)
    for number in range(1, run_ahead + 1):
        assert ledger.has_room
        ledger.enqueue(launch(number))
    assert not ledger.has_room
    ledger.commit(1)
    assert not ledger.has_room, "its tokens are committed, but most of its F is to come"
    ledger.end(0, in_tail=1)
    assert ledger.has_room, "whether or not its F has ended"


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
def test_the_tail_alone_makes_no_room(run_ahead: int) -> None:
    ledger = make(run_ahead)
    for number in range(1, run_ahead + 1):
        ledger.enqueue(launch(number))
    ledger.end(0, in_tail=1)
    assert not ledger.has_room, "its tokens are not committed"
    ledger.commit(1)
    assert ledger.has_room


def test_a_launch_that_has_ended_is_past_its_tail() -> None:
    ledger = make(1)
    ledger.enqueue(launch(1))
    ledger.commit(1)
    ledger.end(1)
    assert (ledger.tail, ledger.has_room) == (1, True)


def test_a_tail_mark_never_goes_back_nor_ahead() -> None:
    ledger = make()
    ledger.enqueue(launch(1))
    with pytest.raises(LedgerError, match="the marks went from 0 to 0, tail 2, of 1"):
        ledger.end(0, in_tail=2)
    ledger.end(0, in_tail=1)
    ledger.end(0, in_tail=0)
    assert ledger.tail == 1


def test_serial_has_room_only_when_nothing_is_in_flight() -> None:
    ledger = make(0)
    assert ledger.has_room
    ledger.enqueue(launch(1))
    ledger.commit(1)
    assert not ledger.has_room, "the tokens are committed, but its F has not ended"
    ledger.end(1)
    assert ledger.has_room


def test_prompt_tokens_are_bounded_together_with_those_of_uncommitted_launches() -> None:
    ledger = make(4, tokens=100)
    ledger.enqueue(launch(1, prompt_tokens=60))
    ledger.enqueue(launch(2, prompt_tokens=10))
    assert ledger.uncommitted_prompt_tokens == 70
    assert ledger.has_room_for(30)
    assert not ledger.has_room_for(31)
    ledger.commit(1)
    assert ledger.has_room_for(90)
    assert not ledger.has_room_for(91)


def test_a_launch_of_any_length_may_go_when_nothing_is_uncommitted() -> None:
    ledger = make(4, tokens=100)
    assert ledger.has_room_for(1000)
    ledger.enqueue(launch(1, prompt_tokens=60))
    ledger.commit(1)
    assert ledger.has_room_for(1000)


def test_a_launch_without_prompt_tokens_is_never_held_back_by_the_bound() -> None:
    ledger = make(4, tokens=100)
    ledger.enqueue(launch(1, prompt_tokens=1000))
    assert ledger.has_room_for(0)
    assert not ledger.has_room_for(1)


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_run_ahead_waits_for_tokens_then_for_the_tail(run_ahead: int) -> None:
    ledger = make(run_ahead)
    ledger.enqueue(launch(1))
    ledger.enqueue(launch(2))
    assert ledger.awaited == (0, FAR, FAR)
    ledger.commit(1)
    assert ledger.awaited == (FAR, FAR, 0), "the next launch is sampled after the tail of this one"
    ledger.end(0, in_tail=1)
    assert ledger.awaited == (1, FAR, FAR)
    ledger.end(1, in_tail=2)
    ledger.commit(2)
    assert ledger.awaited == (FAR, 1, FAR), "only F is outstanding"


def test_serial_waits_for_the_end_of_f() -> None:
    ledger = make(0)
    ledger.enqueue(launch(1))
    assert ledger.awaited == (FAR, 0, FAR)
    ledger.commit(1)
    assert ledger.awaited == (FAR, 0, FAR)


def test_the_fence_gives_each_resource_back_once_when_its_launch_has_retired() -> None:
    ledger = make()
    ledger.enqueue(launch(1))
    ledger.defer(1, "blocks")
    ledger.defer(2, "slot")
    ledger.commit(1)
    assert ledger.due() == []
    ledger.end(1)
    assert ledger.due() == ["blocks"]
    assert ledger.due() == []
    ledger.enqueue(launch(2))
    ledger.commit(2)
    ledger.end(2)
    assert ledger.due() == ["slot"]
    assert ledger.fenced == 0
    assert ledger.deferred_total == 2


def test_the_fence_refuses_a_launch_that_nobody_has_promised() -> None:
    ledger = make()
    with pytest.raises(LedgerError, match="waits for launch 2"):
        ledger.defer(2, "slot")


def test_what_is_deferred_for_a_launch_that_has_retired_is_due_at_once() -> None:
    ledger = make()
    ledger.enqueue(launch(1))
    ledger.commit(1)
    ledger.end(1)
    ledger.defer(1, "late")
    assert ledger.due() == ["late"]


def test_a_launch_is_owed_while_logits_wait_to_be_sampled() -> None:
    ledger = make()
    assert not ledger.owes_a_launch
    ledger.enqueue(launch(1, samples=False))
    assert not ledger.owes_a_launch
    ledger.enqueue(launch(2))
    assert ledger.owes_a_launch


def test_calls_are_bounded_together_with_those_of_launches_that_have_not_ended() -> None:
    ledger = make(4, tokens=100)
    assert ledger.has_room_for_calls(1000, 960), "whatever it takes, where nothing is before it"
    ledger.enqueue(launch(1, calls=300))
    assert ledger.has_room_for_calls(1000, 960), "behind one alone, too: the device is busy with that"
    ledger.enqueue(launch(2, calls=1))
    assert ledger.has_room_for_calls(659, 960)
    assert not ledger.has_room_for_calls(660, 960)
    ledger.commit(1)
    assert not ledger.has_room_for_calls(660, 960), "committed, and not ended"
    ledger.end(1)
    assert ledger.has_room_for_calls(1000, 960)
