"""Recurrent mixers of rows with several query tokens by the Triton kernels, against the reference's recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import DeltaShape, Mamba2, Mamba2Shape  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.gated_delta_scan import delta_of_chunks  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.mamba2_scan import mamba2_of_chunks  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.scan import ChunkRows, length_of_sub_chunks  # noqa: E402
from tests.gpu.gpu_chain import moved  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402
from tests.runtime.kernels.recurrent_batches import Row, batch_of  # noqa: E402
from tests.runtime.kernels.recurrent_mixers import (  # noqa: E402
    DELTA,
    MAMBA2,
    Mixer,
    by_the_reference,
    drawn,
    gated_delta,
    held_states,
    mixer_of,
)

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
HALF = torch.bfloat16
CLOSE = {torch.float32: 2e-5, HALF: 2e-2}
LENGTH = length_of_sub_chunks(torch.float32)
SHAPES = [*MAMBA2, *DELTA]
OF_EACH = [MAMBA2[1], DELTA[1]]


def chunks(
    mixer: Mixer, projected: torch.Tensor, states: tuple[torch.Tensor, ...], rows: Sequence[Row], padding: int = 0
) -> torch.Tensor:
    """By the kernels. states: on the device, changed in place. padding: query tokens behind the last row's."""
    batch = batch_of(rows)
    batch = moved(replace(batch, is_decode=False, num_tokens=batch.num_tokens + padding), DEVICE)
    extended = torch.cat([projected, projected.new_full((padding, projected.shape[1]), torch.nan)]).to(DEVICE)
    weights = moved(mixer, DEVICE)
    of = mamba2_of_chunks if isinstance(mixer, Mamba2) else delta_of_chunks
    return of(extended, weights, states, ChunkRows(batch, length_of_sub_chunks(projected.dtype))).cpu()


def by_parts(
    mixer: Mixer, projected: torch.Tensor, states: tuple[torch.Tensor, ...], counts: Sequence[int]
) -> torch.Tensor:
    """A row from its beginning on, in launches of so many tokens."""
    found, first = [], 0
    for count in counts:
        found.append(chunks(mixer, projected[first : first + count], states, [Row(1, first, count)]))
        first += count
    return torch.cat(found)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=() if shape in OF_EACH else pytest.mark.large)
        for shape in SHAPES
        for dtype in (torch.float32, HALF)
    ],
)
def test_chunks_of_several_rows_are_those_of_the_reference(shape: Mamba2Shape | DeltaShape, dtype: torch.dtype) -> None:
    """Rows that begin and rows that go on, at anchors and between them, of any number of tokens."""
    mixer = mixer_of(shape, dtype)
    rows = [Row(2, 0, 75), Row(0, 21, 2), Row(4, 64, 64), Row(5, 9, 30, alive=False), Row(1, 40, 50)]
    tokens = sum(row.count for row in rows)
    projected = drawn(tokens, shape, dtype)
    expected_states, states = held_states(mixer), moved(held_states(mixer), DEVICE)
    expected = by_the_reference(mixer, projected, expected_states, rows)[:tokens]
    found = chunks(mixer, projected, states, rows, padding=3)
    assert relative_error(found[:tokens], expected) < CLOSE[dtype]
    assert found[141:171].eq(0).all() and found[tokens:].eq(0).all(), "masked tokens and padding leave zeros"
    for one, other in zip(states, expected_states, strict=True):
        assert relative_error(one, other) < CLOSE[dtype]
        assert torch.equal(one.cpu()[[3, 5]], held_states(mixer)[0 if one is states[0] else 1][[3, 5]])


@pytest.mark.parametrize("shape", OF_EACH)
def test_a_state_is_handed_from_chunk_to_chunk_however_they_are_cut(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(101, shape)
    expected = by_the_reference(mixer, projected, held_states(mixer), [Row(1, 0, 101)])[:101]
    for counts in ((101,), (50, 3, 48)):
        states = moved(held_states(mixer), DEVICE)
        assert relative_error(by_parts(mixer, projected, states, counts), expected) < CLOSE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(HALF, marks=pytest.mark.large)])
@pytest.mark.parametrize("shape", OF_EACH)
def test_a_cut_at_an_anchor_changes_no_bit(
    shape: Mamba2Shape | DeltaShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    length = length_of_sub_chunks(dtype)
    mixer, projected = mixer_of(shape, dtype), drawn(3 * length + 5, shape, dtype)
    whole = moved(held_states(mixer), DEVICE)
    expected = by_parts(mixer, projected, whole, [3 * length + 5])
    for counts in ((length, 2 * length + 5), (2 * length, length, 5)):
        states = moved(held_states(mixer), DEVICE)
        assert torch.equal(by_parts(mixer, projected, states, counts), expected), counts
        for one, other in zip(states, whole, strict=True):
            assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("shape", OF_EACH)
def test_anchors_are_the_request_s_own_wherever_a_launch_begins(
    shape: Mamba2Shape | DeltaShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a cut between two of them, the next cut at one changes no bit again."""
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    mixer, projected = mixer_of(shape), drawn(2 * LENGTH + 3, shape)
    once, twice = moved(held_states(mixer), DEVICE), moved(held_states(mixer), DEVICE)
    found = by_parts(mixer, projected, once, (11, 2 * LENGTH - 8))
    assert torch.equal(by_parts(mixer, projected, twice, (11, LENGTH - 11, LENGTH + 3)), found)


@pytest.mark.parametrize("shape", OF_EACH)
def test_neighbours_and_places_change_no_bit(shape: Mamba2Shape | DeltaShape, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    mixer, projected = mixer_of(shape), drawn(90, shape)
    alone = moved(held_states(mixer), DEVICE)
    expected = chunks(mixer, projected[:40], alone, [Row(3, 20, 40)])
    states = moved(held_states(mixer), DEVICE)
    crowd = torch.cat([projected[40:49], projected[:40], projected[49:], projected[:3]])
    nobody = Row(-1, 0, 3, alive=False)  # padding has no slot
    found = chunks(mixer, crowd, states, [Row(1, 0, 9), Row(3, 20, 40), Row(2, 7, 41), nobody], padding=2)
    assert torch.equal(found[9:49], expected)
    for one, other in zip(states, alone, strict=True):
        assert torch.equal(one[3], other[3])


@pytest.mark.parametrize("shape", OF_EACH)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of what is no number
def test_masked_rows_and_those_of_one_token_leave_their_states_as_they_are(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(24, shape)
    projected[0] = torch.nan
    projected[12:18] = torch.nan
    states = moved(held_states(mixer), DEVICE)
    rows = [Row(0, 3, 1), Row(2, 8, 11), Row(1, 5, 6, alive=False), Row(4, 9, 0), Row(5, 0, 6)]
    found = chunks(mixer, projected, states, rows)
    assert found[1:12].isfinite().all() and found[18:].isfinite().all()
    assert found[0].eq(0).all() and found[12:18].eq(0).all()
    for tensor, was in zip(states, held_states(mixer), strict=True):
        assert torch.equal(tensor.cpu()[[0, 1, 3, 4]], was[[0, 1, 3, 4]])
        assert not torch.equal(tensor.cpu()[2], was[2]) and not torch.equal(tensor.cpu()[5], was[5])


@pytest.mark.parametrize("shape", OF_EACH)
def test_a_row_goes_on_from_a_snapshot_and_leaves_its_state_in_another(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(47, shape)
    own, states = moved(held_states(mixer), DEVICE), moved(held_states(mixer), DEVICE)
    for tensor in own:
        tensor[2] = tensor[5]
    expected = chunks(mixer, projected, own, [Row(2, 32, 2), Row(0, 3, 40), Row(4, 0, 5)])
    rows = [Row(2, 32, 2, begins_as=5), Row(0, 3, 40, left_in=1), Row(4, 0, 5, begins_as=5, left_in=3)]
    assert torch.equal(chunks(mixer, projected, states, rows), expected)
    for one, other, was in zip(states, own, held_states(mixer), strict=True):
        assert torch.equal(one[[0, 2, 4]], other[[0, 2, 4]])
        assert torch.equal(one[[1, 3]], other[[0, 4]])
        assert torch.equal(one[5].cpu(), was[5]), "a snapshot that is read stays as it is"


@pytest.mark.parametrize("shape", OF_EACH)
def test_a_row_that_begins_does_not_see_what_its_slot_holds(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, projected = mixer_of(shape), drawn(7, shape)
    spoilt = tuple(tensor.fill_(torch.nan) for tensor in moved(held_states(mixer), DEVICE))
    clean = tuple(torch.zeros_like(tensor) for tensor in spoilt)
    found = chunks(mixer, projected, spoilt, [Row(1, 0, 7)])
    assert torch.equal(found, chunks(mixer, projected, clean, [Row(1, 0, 7)]))
    assert found.isfinite().all()
    for one, other in zip(spoilt, clean, strict=True):
        assert torch.equal(one[1], other[1])


def test_keys_that_are_all_alike_do_not_make_the_inverse_large() -> None:
    """By sums of powers it would be lost among numbers of 18 digits: it is one of ones and minus ones."""
    shape = DELTA[0]
    mixer = gated_delta(shape, torch.float32)
    mixer = replace(mixer, a=torch.zeros_like(mixer.a))
    projected = drawn(1, shape).repeat(4 * LENGTH, 1)
    projected[:, shape.inner + shape.channels :][:, : shape.value_heads] = 30.0
    projected[:, shape.inner + 2 * shape.keys :][:, : shape.inner] = drawn(4 * LENGTH, shape)[:, : shape.inner]
    expected = by_the_reference(mixer, projected, held_states(mixer), [Row(1, 0, 4 * LENGTH)])
    states = moved(held_states(mixer), DEVICE)
    assert relative_error(chunks(mixer, projected, states, [Row(1, 0, 4 * LENGTH)]), expected) < 1e-4
