"""Ledger, block pool and slot pool in any order of events that the chain allows, against the rules of the fence.

What the machine knows is written down anew here: for each launch what it names, for each thing that was given up which
launch lets it go, for each block who holds it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.runtime.memory.block_pool import NULL_BLOCK, BlockPool, BlockPoolError, SlotPool, SlotPoolError
from runahead.runtime.scheduler.ledger import Launch, Ledger, LedgerError
from runahead.runtime.wire.prompts import Content

BLOCKS = 8
SLOTS = 3
CONTENTS = [Content(f"key {i}".encode(), b"tokens") for i in range(2)]
FORGED = [Content(content.key, b"others") for content in CONTENTS]
_SLOTS, _EPOCHS = np.zeros(0, np.int32), np.zeros(0, np.int64)
_FLAGS = np.zeros(0, np.bool_)


@dataclass(eq=False)
class Holder:
    """A row: what it holds, and the last launch that names it."""

    slot: int
    blocks: list[int] = field(default_factory=list)
    last_launch: int = 0


@dataclass(frozen=True)
class GivenUp:
    """What a row gave up, with a serial number of its own."""

    number: int
    blocks: tuple[int, ...]
    slot: int | None = None


class ChainMachine(RuleBasedStateMachine):
    """Rows come, take, find and share blocks, are launched and end; marks move; the fence gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS + 1, 8)
        self.slots = SlotPool(SLOTS, "slot")
        self.ledger: Ledger[GivenUp] = Ledger(2, 512)
        self.rows: list[Holder] = []
        self.waits: dict[GivenUp, int] = {}  # given up, not given back, and the launch that lets it go
        self.back: Counter[int] = Counter()  # how often each was given back
        self.named: dict[int, tuple[set[int], set[int]]] = {}  # by launch: blocks and slots
        self.last_slots: set[int] = set()  # of the newest launch's F
        self.contents: dict[int, Content] = {}
        self.gone: list[int] = []  # launches in the order in which they retired

    # ------------------------------------------------------------ rows

    @initialize()
    def two_rows_and_something_to_find(self) -> None:
        for content in CONTENTS:
            self.begin()
            block = self.pool.allocate(1)[0]
            self.rows[-1].blocks.append(block)
            assert self.pool.make_findable(block, content)
            self.contents[block] = content

    @rule()
    def begin(self) -> None:
        if not self.slots.free:
            with pytest.raises(SlotPoolError):
                self.slots.allocate()
            return
        slot = self.slots.allocate()
        assert slot not in self._slots_in_flight(), "a launch that has not retired names this slot"
        assert slot not in {row.slot for row in self.rows}
        self.rows.append(Holder(slot))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 4))
    def allocate(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        if count > self.pool.available:
            with pytest.raises(BlockPoolError):
                self.pool.allocate(count)
            return
        free = self.pool.free
        given = self.pool.allocate(count)
        assert len(set(given)) == count
        assert NULL_BLOCK not in given
        assert not set(given) & self._blocks_in_flight(), "a launch that has not retired names a block given out"
        assert not set(given) & {block for other in self.rows for block in other.blocks}
        forgotten = [block for block in given if self.contents.pop(block, None) is not None]
        assert len(forgotten) == max(0, count - free), "cached blocks only when nothing is free"
        row.blocks += given

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def find_and_share(self, data: st.DataObject, content: Content) -> None:
        block = self.pool.find(content)
        assert block == next((b for b, held in self.contents.items() if held == content), None)
        others = [row for row in self.rows if block not in row.blocks]
        if block is None or not others:
            return
        row = data.draw(st.sampled_from(others))
        cached = block in {*self._cached()}
        before = self.pool.available
        self.pool.share([block])
        assert self.pool.available == before - cached
        row.blocks.append(block)

    @rule(looked_up=st.lists(st.sampled_from(CONTENTS), unique=True))
    def watch(self, looked_up: list[Content]) -> None:
        """From now on the pool counts, of these, the findable and the available ones: `check` counts them anew."""
        watched = self.pool.watch()
        there = [self.pool.extend(content) for content in looked_up]
        assert len(watched.blocks) == sum(there)

    @rule()
    def shorten(self) -> None:
        self.pool.shorten()

    @rule(content=st.sampled_from(FORGED))
    def find_forged(self, content: Content) -> None:
        assert self.pool.find(content) is None

    @precondition(lambda self: any(row.blocks for row in self.rows))
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def make_findable(self, data: st.DataObject, content: Content) -> None:
        block = data.draw(st.sampled_from([block for row in self.rows for block in row.blocks]))
        new = content not in self.contents.values() and block not in self.contents
        assert self.pool.make_findable(block, content) == new
        if new:
            self.contents[block] = content

    @precondition(lambda self: any(row.blocks for row in self.rows))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for row in self.rows for block in row.blocks]))
        self.pool.forget([block])
        self.contents.pop(block, None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end_row(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.rows)))

    def _end(self, row: Holder) -> None:
        self.rows.remove(row)
        self.pool.fence(row.blocks)
        self.slots.fence(row.slot)
        # Blocks with the last F that names them, the slot with the S after it, which may be a launch that is owed.
        self._defer(row.last_launch, GivenUp(self.ledger.deferred_total, tuple(row.blocks)))
        last_naming = row.last_launch + 1 if row.last_launch else 0
        self._defer(last_naming, GivenUp(self.ledger.deferred_total, (), row.slot))

    def _defer(self, number: int, given: GivenUp) -> None:
        self.waits[given] = number
        self.ledger.defer(number, given)

    # ------------------------------------------------------------ launches

    @precondition(lambda self: self.ledger.has_room)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        self._enqueue(data.draw(st.lists(st.sampled_from(self.rows), unique=True)) if self.rows else [])

    def _enqueue(self, rows: list[Holder]) -> None:
        number = self.ledger.launched + 1
        shape = LaunchShape(number, 0, Form.PLAIN, 0, 0, is_decode=False)
        self.ledger.enqueue(Launch(shape, _SLOTS, _EPOCHS, _FLAGS, _SLOTS, _EPOCHS, _FLAGS))
        for row in rows:
            row.last_launch = number
        slots = {row.slot for row in rows}
        # Its S looks at the rows of the F before.
        self.named[number] = ({block for row in rows for block in row.blocks}, slots | self.last_slots)
        self.last_slots = slots

    @precondition(lambda self: self.ledger.uncommitted)
    @rule()
    def commit(self) -> None:
        number = self.ledger.committed + 1
        assert self.ledger.next_to_commit().number == number
        # The S of a launch runs after the F of the one before.
        if self.ledger.ended < number - 1:
            self.ledger.end(number - 1)
        self.ledger.commit(number)
        self._retire()

    @precondition(lambda self: self.ledger.tail < self.ledger.launched)
    @rule(data=st.data())
    def reach_tail(self, data: st.DataObject) -> None:
        self.ledger.end(self.ledger.ended, data.draw(st.integers(self.ledger.tail, self.ledger.launched)))

    @precondition(lambda self: self.ledger.ended < self.ledger.launched)
    @rule(data=st.data())
    def end_launch(self, data: st.DataObject) -> None:
        self.ledger.end(data.draw(st.integers(self.ledger.ended, self.ledger.launched)))
        self._retire()

    @rule(ahead=st.integers(2, 4))
    def out_of_order(self, ahead: int) -> None:
        with pytest.raises(LedgerError):
            self.ledger.commit(self.ledger.committed + ahead)
        with pytest.raises(LedgerError):
            self.ledger.commit(self.ledger.committed)
        with pytest.raises(LedgerError):
            self.ledger.end(self.ledger.launched + 1)
        with pytest.raises(LedgerError):
            self.ledger.end(self.ledger.ended, self.ledger.launched + 1)
        with pytest.raises(LedgerError):
            self.ledger.defer(self.ledger.launched + ahead, GivenUp(-1, ()))

    def _retire(self) -> None:
        self.gone += [launch.number for launch in self.ledger.retire()]

    @rule()
    def give_back(self) -> None:
        for given in self.ledger.due():
            assert self.waits.pop(given) <= self.ledger.retired, "given back too early"
            self.back[given.number] += 1
            freed = self.pool.release(given.blocks)
            assert not set(freed) & self._blocks_in_flight(), "a launch that has not retired names a free block"
            if given.slot is not None:
                self.slots.release(given.slot)
        assert all(number > self.ledger.retired for number in self.waits.values()), "given back too late"

    # ------------------------------------------------------------ what is so at any time

    def _blocks_in_flight(self) -> set[int]:
        return {b for number, (blocks, _) in self.named.items() if number > self.ledger.retired for b in blocks}

    def _slots_in_flight(self) -> set[int]:
        return {s for number, (_, slots) in self.named.items() if number > self.ledger.retired for s in slots}

    def _held(self) -> set[int]:
        return {block for row in self.rows for block in row.blocks}

    def _cached(self) -> set[int]:
        waiting = {block for given in self.waits for block in given.blocks}
        return set(self.contents) - self._held() - waiting

    @invariant()
    def every_block_and_slot_is_in_one_place(self) -> None:
        self.pool.check()
        self.slots.check()
        held = self._held()
        fenced = {block for given in self.waits for block in given.blocks} - held
        assert (self.pool.owned, self.pool.fenced, self.pool.cached) == (len(held), len(fenced), len(self._cached()))
        assert self.pool.free == BLOCKS - len(held) - len(fenced) - len(self._cached())
        assert self.slots.owned == len(self.rows)
        assert self.slots.fenced == sum(given.slot is not None for given in self.waits)

    @invariant()
    def what_is_given_up_is_given_back_once_and_not_before(self) -> None:
        assert self.ledger.fenced == len(self.waits)
        assert all(times == 1 for times in self.back.values())
        assert len(self.back) + len(self.waits) == self.ledger.deferred_total

    @invariant()
    def launches_retire_in_order(self) -> None:
        assert self.gone == list(range(1, self.ledger.retired + 1))
        assert self.ledger.retired == min(self.ledger.committed, self.ledger.ended)
        assert [launch.number for launch in self.ledger.launches()] == list(
            range(self.ledger.retired + 1, self.ledger.launched + 1)
        )
        assert self.ledger.uncommitted <= self.ledger.run_ahead
        assert self.ledger.ended <= self.ledger.tail <= self.ledger.launched

    @invariant()
    def only_what_was_made_findable_is_found(self) -> None:
        assert self.pool.findable == len(self.contents)
        for content in CONTENTS:
            block = self.pool.find(content)
            assert self.contents.get(block) == content if block is not None else content not in self.contents.values()

    def teardown(self) -> None:
        """Everything ends, and everything is back."""
        for row in list(self.rows):
            self._end(row)
        self._enqueue([])  # samples the rows of the last F, if it had any
        while self.ledger.uncommitted:
            self.commit()
        self.ledger.end(self.ledger.launched)
        self._retire()
        self.give_back()
        assert (self.pool.available, self.slots.free, self.ledger.fenced) == (BLOCKS, SLOTS, 0)
        self.every_block_and_slot_is_in_one_place()
        self.what_is_given_up_is_given_back_once_and_not_before()


class TestChainMachine(ChainMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=300, stateful_step_count=50, derandomize=True, deadline=None, database=None)
