"""What front ends share: figures in memory, each line with one writer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from runahead.service.contract.errors import STATUS_OF
from runahead.service.shared_memory.board import REFUSALS, Board, FrontEndCounters
from runahead.service.shared_memory.call_tables import ROWS, Resource

OTHER = """
import sys
from runahead.service.shared_memory.board import Board
from runahead.service.shared_memory.call_tables import Resource
line = Board(2, int(sys.argv[1])).line(1)
for _ in range(5):
    line.refuse("QUEUE_FULL")
line.refused += 5
line.front_ends = 1
line.held.add(line.held.number_of("alice"), {Resource.STREAMS: 3, Resource.QUEUED_TOKENS: 100})
"""


@pytest.fixture
def memory() -> Iterator[int]:
    """Of two front ends."""
    with tempfile.TemporaryFile() as file:
        file.truncate(Board.size(2))
        yield file.fileno()


def run_the_other(memory: int) -> None:
    """It has ended without a word when this returns."""
    subprocess.run([sys.executable, "-c", OTHER, str(memory)], pass_fds=(memory,), check=True, timeout=60)


def test_another_process_s_figures_are_added_up_and_what_it_had_open_goes_with_it(memory: int) -> None:
    board = Board(2, memory)
    line = board.line(0)
    line.refused, line.front_ends, line.cancelled = 2, 1, 1 << 40
    line.refuse("QUEUE_FULL")
    line.refuse("NO_RIGHT")
    line.held.add(line.held.number_of("alice"), {Resource.STREAMS: 1})
    run_the_other(memory)
    assert board.total() == FrontEndCounters(open_streams=4, refused=7, front_ends=2, cancelled=1 << 40)
    assert board.refusals() == {"QUEUE_FULL": 6, "NO_RIGHT": 1}
    board.clear(1)
    assert board.total() == FrontEndCounters(open_streams=1, refused=7, front_ends=1, cancelled=1 << 40)
    assert Board(2, memory).line(1).refused == 5, "whoever is started in its place goes on from there"
    assert board.refusals() == {"QUEUE_FULL": 6, "NO_RIGHT": 1}


def test_what_a_caller_holds_is_the_sum_over_all_front_ends_and_nobody_else_s(memory: int) -> None:
    board = Board(2, memory)
    line = board.line(0).held
    alice, bob = line.number_of("alice"), line.number_of("bob")
    line.add(alice, {Resource.STREAMS: 1})
    line.add(bob, {Resource.STREAMS: 2, Resource.UPLOADS: 9})
    run_the_other(memory)
    assert board.held.of(alice).tolist() == [4, 100, 0, 0, 0]
    assert board.held.of(bob).tolist() == [2, 0, 0, 9, 0]
    assert board.held.in_all().tolist() == [6, 100, 0, 9, 0]
    board.clear(1)
    assert board.held.of(alice).tolist() == [1, 0, 0, 0, 0]
    run_the_other(memory)
    board.line(1)
    assert board.held.of(alice).tolist() == [1, 0, 0, 0, 0], "whoever is started in its place holds nothing"


def test_callers_without_a_row_of_their_own_are_one_caller_until_there_are_rows_again() -> None:
    board = Board()
    line = board.line(0).held
    numbers = [line.number_of(f"caller {i}") for i in range(ROWS)]
    for number in numbers:
        line.add(number, {Resource.STREAMS: 1})
    one, other = line.number_of("one more"), line.number_of("another")
    assert one == other and one not in numbers
    line.add(one, {Resource.STREAMS: 1})
    line.add(other, {Resource.STREAMS: 1})
    assert board.held.of(one)[Resource.STREAMS] == 2
    assert line.number_of("caller 7") == numbers[7], "who has a row keeps it"
    line.add(numbers[7], {Resource.STREAMS: -1})
    assert line.number_of("one more") != one
    line.add(one, {Resource.STREAMS: -2})
    assert board.held.in_all()[Resource.STREAMS] == ROWS - 1


def test_what_a_call_gave_back_is_given_back_once_and_counted() -> None:
    board = Board()
    line = board.line(0).held
    number = line.number_of("alice")
    with line.holding(number, {Resource.STREAMS: 1, Resource.QUEUED_TOKENS: 50}) as holding:
        holding.keep(Resource.QUEUED_TOKENS, 20)
        holding.keep(Resource.QUEUED_TOKENS, 30)
        assert board.held.of(number).tolist() == [1, 20, 0, 0, 0], "it never holds more than before"
        holding.keep(Resource.QUEUED_TOKENS)
        assert board.held.of(number).tolist() == [1, 0, 0, 0, 0]
    holding.close()
    assert board.held.of(number).tolist() == board.held.in_all().tolist() == [0, 0, 0, 0, 0]
    assert board.held.left().tolist() == [1, 50, 0, 0, 0]


def test_what_refuses_is_counted_by_its_reason_and_what_fails_is_not() -> None:
    assert set(REFUSALS) <= set(STATUS_OF)
    board = Board()
    board.line(0).refuse("DEVICE")
    board.line(0).refuse("NO_RIGHT")
    assert board.refusals() == {"NO_RIGHT": 1}


def test_a_board_of_one_process_needs_no_file() -> None:
    board = Board()
    board.line(0).stop_strings += 1
    assert board.total() == FrontEndCounters(stop_strings=1)
    assert Board().total() == FrontEndCounters()
