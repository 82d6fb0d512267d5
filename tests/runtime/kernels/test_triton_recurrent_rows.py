"""Recurrent mixers of rows with one query token by the Triton kernels, against the reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import DeltaShape, Mamba2, Mamba2Shape  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.gated_delta_decode import delta_of_decode_rows  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.mamba2_decode import mamba2_of_decode_rows  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.tiling import LONE_ROW, STATES, StateTiling  # noqa: E402
from tests.gpu.gpu_chain import moved  # noqa: E402
from tests.runtime.kernels.recurrent_batches import Row, batch_of  # noqa: E402
from tests.runtime.kernels.recurrent_mixers import (  # noqa: E402
    DELTA,
    MAMBA2,
    Mixer,
    by_the_reference,
    drawn,
    held_states,
    mamba2,
    mixer_of,
    with_runs,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HALF = torch.bfloat16
CLOSE = {torch.float32: 1e-5, HALF: 1e-2}
ROWS = (Row(2, 7, 1), Row(0, 0, 1), Row(4, 1, 1))  # the second begins here


def one_token(
    mixer: Mixer,
    projected: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    rows: Sequence[Row],
    tiling: StateTiling = STATES,
    *,
    squares: torch.Tensor | None = None,
    scaled: bool = True,
) -> torch.Tensor:
    """By the kernel. states: on the device, changed in place, without room for drafts. squares: as
    `mamba2_of_decode_rows` has them; with squares the result is multiplied by the norm's scale, if scaled."""
    batch = moved(batch_of(rows), DEVICE)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    out = torch.empty((len(projected), mixer.shape.inner), dtype=projected.dtype, device=DEVICE)
    weights, states = moved(mixer, DEVICE), moved(with_runs(mixer, states, 0), DEVICE)
    if isinstance(mixer, Mamba2):
        tiles = mamba2_of_decode_rows(
            projected.to(DEVICE), weights, states, batch, out, arrived, dependent=False, squares=squares,
            tiling=tiling,
        )  # fmt: skip
        if squares is not None and scaled:
            mean = squares[:tiles, : len(projected)].sum(0) / mixer.shape.inner
            out = out * (mean + mixer.gated_norm.eps).rsqrt()[:, None].to(out.dtype)
    else:
        delta_of_decode_rows(projected.to(DEVICE), weights, states, batch, out, arrived, dependent=False, tiling=tiling)
    assert not arrived.any()
    return out.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(HALF, marks=pytest.mark.large)])
@pytest.mark.parametrize("shape", [*MAMBA2, *DELTA])
def test_tokens_one_after_the_other_are_those_of_the_reference(
    shape: Mamba2Shape | DeltaShape, dtype: torch.dtype
) -> None:
    mixer = mixer_of(shape, dtype)
    expected_states, states = held_states(mixer), moved(held_states(mixer), DEVICE)
    for further in range(3):
        rows = [Row(row.state_slot, row.first + further, 1) for row in ROWS]
        projected = drawn(len(rows), shape, dtype, seed=further)
        expected = by_the_reference(mixer, projected, expected_states, rows)
        found = one_token(mixer, projected, states, rows)
        assert relative_error(found, expected) < CLOSE[dtype]
    for one, other in zip(states, expected_states, strict=True):
        assert relative_error(one, other) < 1e-5, "states are float32, whatever the dtype"


ONE_GROUP = [shape for shape in MAMBA2 if shape.groups == 1]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", ONE_GROUP)
def test_the_norm_s_scale_may_be_left_to_whoever_reads_the_result(shape: Mamba2Shape, count: int) -> None:
    mixer, projected, rows = mamba2(shape, torch.float32), drawn(count, shape), ROWS[:count]
    expected_states, states = held_states(mixer), moved(held_states(mixer), DEVICE)
    expected = by_the_reference(mixer, projected, expected_states, rows)
    squares = torch.full((shape.inner, 8), torch.nan, dtype=torch.float64, device=DEVICE)
    assert relative_error(one_token(mixer, projected, states, rows, squares=squares), expected) < 1e-5
    for one, other in zip(states, expected_states, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("shape", ONE_GROUP)
def test_a_lone_row_s_sums_of_squares_are_those_that_it_has_among_others(shape: Mamba2Shape) -> None:
    mixer, projected = mamba2(shape, HALF), drawn(3, shape, HALF)
    found = []
    for count, tiling in ((3, STATES), (1, STATES), (1, StateTiling(LONE_ROW.words // 8, LONE_ROW.warps))):
        squares = torch.full((shape.inner, 8), torch.nan, dtype=torch.float64, device=DEVICE)
        states = moved(held_states(mixer), DEVICE)
        out = one_token(mixer, projected[:count], states, ROWS[:count], tiling, squares=squares)
        found.append((out[0], squares[:, 0].nansum()))
    assert all(torch.equal(out, found[0][0]) and total == found[0][1] for out, total in found)


@pytest.mark.parametrize("shape", [*MAMBA2, *DELTA])
def test_states_cut_for_a_lone_row_move_on_as_others_do(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(1, shape)
    tiling = StateTiling(LONE_ROW.words // 4, LONE_ROW.warps)  # the tests' shapes are smaller than models'
    expected_states, states = held_states(mixer), moved(held_states(mixer), DEVICE)
    expected = by_the_reference(mixer, projected, expected_states, ROWS[:1])
    assert relative_error(one_token(mixer, projected, states, ROWS[:1], tiling), expected) < 1e-5
    for one, other in zip(states, expected_states, strict=True):
        assert relative_error(one, other) < 1e-5


def test_steps_are_limited_and_a_convolution_may_have_no_bias() -> None:
    mixer = mamba2(MAMBA2[0], torch.float32, bias=False, limits=(0.1, 0.5))
    projected, states = drawn(3, mixer.shape), moved(held_states(mixer), DEVICE)
    expected = by_the_reference(mixer, projected, held_states(mixer), ROWS)
    assert relative_error(one_token(mixer, projected, states, ROWS), expected) < 1e-5


@pytest.mark.parametrize(("shape", "left"), [(MAMBA2[1], False), (ONE_GROUP[0], True), (DELTA[1], False)])
def test_masked_rows_and_those_of_several_tokens_leave_their_states_as_they_are(
    shape: Mamba2Shape | DeltaShape, left: bool
) -> None:
    mixer = mixer_of(shape)
    before = held_states(mixer)
    states = moved(held_states(mixer), DEVICE)
    projected = drawn(5, shape)
    projected[[3, 4]] = torch.nan
    rows = [Row(2, 5, 2), Row(3, 4, 1), Row(1, 6, 1, alive=False), Row(4, 0, 1, alive=False)]
    squares = [torch.full((shape.inner, 8), torch.nan, dtype=torch.float64, device=DEVICE) if left else None] * 2
    found = one_token(mixer, projected, states, rows, squares=squares[0])
    alone = one_token(mixer, projected[2:3], moved(held_states(mixer), DEVICE), rows[1:2], squares=squares[1])
    assert found[:2].isnan().all(), "a row of several tokens is somebody else's"
    assert torch.equal(found[2:3], alone)
    assert found[3:].eq(0).all(), "masked rows leave zeros"
    for tensor, was in zip(states, before, strict=True):
        others = [slot for slot in range(len(was)) if slot != 3]
        assert torch.equal(tensor.cpu()[others], was[others])
        assert not torch.equal(tensor.cpu()[3], was[3])


@pytest.mark.parametrize("shape", [MAMBA2[0], DELTA[0]])
def test_a_row_that_begins_does_not_see_what_its_slot_holds(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(1, shape)
    spoilt = tuple(tensor.fill_(torch.nan) for tensor in moved(held_states(mixer), DEVICE))
    clean = tuple(torch.zeros_like(tensor) for tensor in spoilt)
    found = one_token(mixer, projected, spoilt, [Row(1, 0, 1)])
    assert torch.equal(found, one_token(mixer, projected, clean, [Row(1, 0, 1)]))
    assert found.isfinite().all()
    for one, other in zip(spoilt, clean, strict=True):
        assert torch.equal(one[1], other[1])
        assert one[[0, 2]].isnan().all(), "other slots are nobody's"


@pytest.mark.parametrize("shape", [MAMBA2[1], DELTA[1]])
def test_a_row_goes_on_from_a_snapshot_and_leaves_its_state_in_another(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(3, shape)
    own, states = moved(held_states(mixer), DEVICE), moved(held_states(mixer), DEVICE)
    for tensor in own:
        tensor[2] = tensor[5]
    expected = one_token(mixer, projected, own, [Row(2, 7, 1), Row(0, 3, 1), Row(4, 0, 1)])
    rows = [Row(2, 7, 1, begins_as=5), Row(0, 3, 1, left_in=1), Row(4, 0, 1, begins_as=5, left_in=3)]
    assert torch.equal(one_token(mixer, projected, states, rows), expected)
    for one, other, was in zip(states, own, held_states(mixer), strict=True):
        assert torch.equal(one[[0, 2, 4]], other[[0, 2, 4]])
        assert torch.equal(one[[1, 3]], other[[0, 4]])
        assert torch.equal(one[5].cpu(), was[5]), "a snapshot that is read stays as it is"


@pytest.mark.parametrize("shape", [MAMBA2[1], DELTA[2]])
def test_neighbours_change_no_bit(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape, HALF), drawn(3, shape, HALF)
    together = moved(held_states(mixer), DEVICE)
    found = one_token(mixer, projected, together, ROWS)
    for place, row in enumerate(ROWS):
        states = moved(held_states(mixer), DEVICE)
        assert torch.equal(one_token(mixer, projected[place : place + 1], states, [row])[0], found[place])
        for one, other in zip(states, together, strict=True):
            assert torch.equal(one[row.state_slot], other[row.state_slot])


@pytest.mark.parametrize("shape", [MAMBA2[0], DELTA[0]])
def test_a_number_that_is_none_stays_in_its_row(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(3, shape)
    sound = one_token(mixer, projected, moved(held_states(mixer), DEVICE), ROWS)
    projected[1] = torch.nan
    nobody = Row(-1, 0, 1, alive=False)  # padding has no slot
    projected = torch.cat([projected, projected[:1]])
    found = one_token(mixer, projected, moved(held_states(mixer), DEVICE), [*ROWS, nobody])
    assert torch.equal(found[[0, 2]], sound[[0, 2]])
    assert found[1].isnan().all() and found[3].eq(0).all()
