"""A layout says where the fields of a declaration lie, for `struct`, NumPy and torch alike."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pytest
import torch

from runahead.runtime.row_record import FLOAT32, INT32, INT64, WordLayout, signed_64


class Record:
    count: Annotated[object, INT32(free=-1)]
    share: Annotated[object, FLOAT32(free=0.5)]
    number: Annotated[object, INT64]


LAYOUT = WordLayout(Record, 6)


def test_fields_lie_in_the_order_of_their_declaration_and_the_rest_is_0() -> None:
    words = np.frombuffer(LAYOUT.struct.pack(7, 0.25, -(1 << 40)), np.int32)
    assert {name: LAYOUT.offset(name) for name in LAYOUT.names} == {"count": 0, "share": 1, "number": 2}
    assert words[0] == 7
    assert words.view(np.float32)[1] == 0.25
    assert words[2:4].copy().view(np.int64)[0] == -(1 << 40)
    assert words[4:].tolist() == [0, 0]


def test_a_buffer_that_nobody_has_set_holds_the_declared_values() -> None:
    assert LAYOUT.struct.unpack(LAYOUT.free()) == (-1, 0.5, 0)


def test_columns_are_views_of_every_line_in_numpy_and_in_torch() -> None:
    table = np.tile(np.frombuffer(LAYOUT.free(), np.int32), (3, 1))
    arrays = LAYOUT.columns(table)
    tensors = LAYOUT.columns(torch.from_numpy(table), {"i": torch.int32, "f": torch.float32, "q": torch.int64})
    arrays["share"][1], arrays["number"][2], tensors["count"][0] = 0.75, -5, 9
    assert tensors["share"].tolist() == [0.5, 0.75, 0.5]
    assert tensors["number"].tolist() == [0, 0, -5]
    assert table[:, 0].tolist() == [9, -1, -1]


def test_a_declaration_that_cannot_be_laid_out_is_refused() -> None:
    class Odd:
        count: Annotated[object, INT32]
        number: Annotated[object, INT64]

    class Untyped:
        count: int

    with pytest.raises(TypeError, match=r"Odd.number has 64 bits and would begin at the odd word 1"):
        WordLayout(Odd, 8)
    with pytest.raises(TypeError, match=r"Untyped.count must be annotated with one word type"):
        WordLayout(Untyped, 8)
    with pytest.raises(TypeError, match="Record needs 4 words and has 3"):
        WordLayout(Record, 3)


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 3, -5, (1 << 64) + 6])
def test_the_64_bits_of_a_seed_are_kept(seed: int) -> None:
    low = signed_64(seed)
    assert -(1 << 63) <= low < 1 << 63
    assert (low - seed) % (1 << 64) == 0
