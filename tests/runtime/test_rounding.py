"""Division that rounds up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runahead.runtime.rounding import ceil_div


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 33])
def test_a_count_is_held_by_as_many_pieces_as_it_begins(count: int) -> None:
    assert ceil_div(count, 16) == math.ceil(count / 16)


def test_a_count_that_no_float_holds_is_divided_exactly() -> None:
    assert ceil_div(2**60 + 1, 2**30) == 2**30 + 1


def test_an_array_keeps_its_type() -> None:
    wide, narrow = np.array([0, 1, 4, 5], np.int64), np.array([0, 1, 4, 5], np.int32)
    assert ceil_div(wide, 4).tolist() == ceil_div(narrow, 4).tolist() == [0, 1, 1, 2]
    assert (ceil_div(wide, 4).dtype, ceil_div(narrow, 4).dtype) == (wide.dtype, narrow.dtype)
