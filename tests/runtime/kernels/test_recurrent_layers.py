"""Layers with recurrent states on the CPU: no cut of a prompt, no neighbor and no kept draft changes a row's bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.runtime.kernels.recurrent_batches import Row
from tests.runtime.kernels.recurrent_layers import (
    DRAFTS,
    HIDDEN,
    DeltaLayer,
    Mamba2Layer,
    RecurrentLayer,
    residual_of,
)

Made = Callable[[], RecurrentLayer]


@pytest.fixture(params=[Mamba2Layer, DeltaLayer], ids=["mamba2", "gated_delta"])
def made(request: pytest.FixtureRequest) -> Made:
    """Makes a layer, each time the same."""
    found: Made = request.param
    return found


@pytest.mark.parametrize("chunks", [(1,) * 19, (8, 8, 3), (1, 17, 1), (5, 1, 1, 12)])
def test_a_state_is_handed_from_chunk_to_chunk_and_no_cut_changes_a_bit(made: Made, chunks: tuple[int, ...]) -> None:
    whole, cut, residual = made(), made(), residual_of(19)
    alone = whole.added(residual, [Row(0, 0, 19)])
    first, parts = 0, []
    for count in chunks:
        parts.append(cut.added(residual[first : first + count], [Row(4, first, count)]))
        first += count
    np.testing.assert_array_equal(np.concatenate(parts), alone)
    for one, other in zip(whole.states, cut.states, strict=True):
        np.testing.assert_array_equal(one[0], other[4])


def test_neighbours_change_no_bit_whatever_they_bring(made: Made) -> None:
    layer, residual = made(), residual_of(12)
    alone = layer.added(residual, [Row(0, 0, 12)])
    layer, other = made(), residual_of(9, seed=1)
    layer.added(other[:4], [Row(3, 0, 4)])
    first = layer.added(np.concatenate([other[4:5], residual[:7], other]), [Row(3, 4, 1), Row(1, 0, 7), Row(0, 0, 9)])
    rest = layer.added(np.concatenate([residual[7:], other[5:6]]), [Row(1, 7, 5), Row(3, 5, 1)])
    np.testing.assert_array_equal(np.concatenate([first[1:8], rest[:5]]), alone)


def test_a_masked_row_leaves_every_state_as_it_is_and_its_numbers_reach_nobody(made: Made) -> None:
    layer, residual = made(), residual_of(6)
    layer.added(residual, [Row(1, 0, 6)])
    before = [tensor.copy() for tensor in layer.states]
    broken = np.full((3, HIDDEN), np.nan, np.float32)
    added = layer.added(np.concatenate([broken, residual[:1]]), [Row(1, 6, 3, alive=False), Row(2, 0, 1)])
    for tensor, was in zip(layer.states, before, strict=True):
        np.testing.assert_array_equal(tensor[1], was[1])
    np.testing.assert_array_equal(added[3:], made().added(residual[:1], [Row(0, 0, 1)]))


def test_a_row_that_begins_does_not_see_what_its_slot_holds(made: Made) -> None:
    layer, residual = made(), residual_of(5)
    once = layer.added(residual, [Row(0, 0, 5)])
    assert np.isfinite(once).all()
    np.testing.assert_array_equal(layer.added(residual, [Row(0, 0, 5)]), once)


@pytest.mark.parametrize("kept", range(DRAFTS + 1))
def test_drafts_that_were_kept_are_replayed_and_those_that_were_not_leave_nothing(made: Made, kept: int) -> None:
    residual = residual_of(14)
    alone = made().added(residual, [Row(0, 0, 14)])
    layer, wrong = made(), residual_of(DRAFTS, seed=1)
    layer.added(residual[:5], [Row(4, 0, 5)])
    run = np.concatenate([residual[5 : 6 + kept], wrong[kept:]])
    other = residual_of(3, seed=2)  # of a row beside it
    found = layer.added(np.concatenate([other, run]), [Row(1, 0, 3), Row(4, 5, 1 + DRAFTS, drafts=DRAFTS)])
    np.testing.assert_array_equal(found[3 : 4 + kept], alone[5 : 6 + kept])
    first = 6 + kept
    layer.added(wrong, [Row(4, first, DRAFTS, alive=False)])  # held, or ended: its run stays
    found = layer.added(residual[first : first + 2], [Row(4, first, 2, replayed=kept, drafts=1)])
    np.testing.assert_array_equal(found, alone[first : first + 2])
    found = layer.added(residual[first + 2 : 14], [Row(4, first + 2, 12 - first, replayed=1)])
    np.testing.assert_array_equal(found, alone[first + 2 :])
