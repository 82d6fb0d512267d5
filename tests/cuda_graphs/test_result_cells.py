"""What S decided, read from result cells of one token a row and of several."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import HELD, NON_FINITE, STOPPED, VOID, CellError, cell_tag, read_cells

NUMBER = 9


def cells(*rows: tuple[int, ...], number: int = NUMBER) -> NDArray[np.int64]:
    return np.array(rows, np.int64) | cell_tag(number)


def test_one_token_of_each_row() -> None:
    found = read_cells(cells((42,), (7 | STOPPED,), (0,)), NUMBER)
    assert np.arange(3)[found.row].tolist() == [0, 1, 2]
    assert found.offset == 0
    assert found.token.tolist() == [42, 7, 0]
    assert found.stopped.tolist() == [False, True, False]
    assert found.failed.tolist() == [False, False, False]


def test_tokens_and_nothing_else_are_read_as_they_are_beside_a_row_that_ended() -> None:
    alone, beside = read_cells(cells((42,), (0,)), NUMBER), read_cells(cells((42,), (0,), (7 | STOPPED,)), NUMBER)
    assert (alone.row, alone.offset) == (beside.row, beside.offset)
    for column in ("token", "stopped", "failed"):
        mine, other = getattr(alone, column), getattr(beside, column)[:2]
        assert (mine.tolist(), mine.dtype) == (other.tolist(), other.dtype), column


def test_a_row_without_finite_logits_has_failed() -> None:
    found = read_cells(cells((42 | STOPPED | NON_FINITE,)), NUMBER)
    assert (found.stopped.tolist(), found.failed.tolist()) == ([True], [True])


def test_no_rows_bring_nothing() -> None:
    assert read_cells(np.zeros((0, 1), np.int64), NUMBER).token.size == 0


def test_rows_bring_as_many_tokens_as_were_accepted_in_their_order() -> None:
    found = read_cells(cells((5, 6, 7), (8, VOID, VOID), (9, 10 | STOPPED, VOID)), NUMBER)
    assert isinstance(found.row, np.ndarray) and isinstance(found.offset, np.ndarray)
    assert found.row.tolist() == [0, 0, 0, 1, 2, 2]
    assert found.offset.tolist() == [0, 1, 2, 0, 0, 1]
    assert found.token.tolist() == [5, 6, 7, 8, 9, 10]
    assert found.stopped.tolist() == [False, False, False, False, False, True]


@pytest.mark.parametrize("width", [1, 3])
def test_another_launchs_cell_is_found(width: int) -> None:
    torn = cells((5,) * width, (6,) * width)
    torn[1, -1] = cells((6,), number=NUMBER - 1)[0, 0]
    with pytest.raises(CellError, match="launch 9: its result slot holds another launch's tokens"):
        read_cells(torn, NUMBER)


def test_a_row_that_goes_on_and_has_no_token_is_found() -> None:
    with pytest.raises(CellError, match="launch 9: the device ended a row that goes on"):
        read_cells(cells((5,), (VOID,)), NUMBER)


@pytest.mark.parametrize("row", [(5, VOID, 6), (5 | STOPPED, 6, VOID)], ids=["a gap", "the end of the row"])
def test_a_token_after_the_last_is_found(row: tuple[int, ...]) -> None:
    with pytest.raises(CellError, match="launch 9: a token follows a gap or the end of its row"):
        read_cells(cells((1, 2, 3), row), NUMBER)


@pytest.mark.parametrize("behind", [(), (VOID, VOID)], ids=["one cell", "three cells"])
def test_a_row_that_is_held_has_no_token(behind: tuple[int, ...]) -> None:
    found = read_cells(cells((5, *behind), (HELD, *behind), (7 | STOPPED, *behind)), NUMBER)
    assert isinstance(found.row, np.ndarray)
    assert found.row.tolist() == [0, 2]
    assert found.token.tolist() == [5, 7]
    assert found.held.tolist() == [1]


@pytest.mark.parametrize("row", [(HELD | 5, VOID), (HELD | STOPPED, VOID), (5, HELD)], ids=["token", "end", "behind"])
def test_a_row_that_is_held_and_more_is_found(row: tuple[int, ...]) -> None:
    with pytest.raises(CellError, match="launch 9: a row is held and has a token or an end"):
        read_cells(cells((1, 2), row), NUMBER)
