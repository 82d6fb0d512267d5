"""The tensors of the row state are those that whoever compares it with the host goes by."""

from __future__ import annotations

from dataclasses import fields

from runahead.runtime.kernels.row_state import PenaltyState, RowState
from runahead.runtime.row_record import PENALTY_TENSORS, ROW_TENSORS


def test_the_row_state_has_the_tensors_that_are_named_beside_the_record_and_no_others() -> None:
    assert tuple(field.name for field in fields(RowState)) == ROW_TENSORS
    assert PenaltyState._fields == PENALTY_TENSORS
