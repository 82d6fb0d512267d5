"""Recurrent mixers of rows with drafts by the Triton kernels, against the reference: what was kept is replayed, the
state is written behind the newest token, and the inputs of drafts are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import DeltaShape, Mamba2, Mamba2Shape  # noqa: E402
from runahead.runtime.kernels.ranks import ONE_RANK  # noqa: E402
from runahead.runtime.kernels.triton.forward.recurrent import squares_of_norm  # noqa: E402
from runahead.runtime.kernels.triton.recurrent import mamba2_decode  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.gated_delta_decode import delta_of_decode_rows  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.tiling import LONE_RUN, STATES, StateTiling  # noqa: E402
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
from tests.runtime.kernels.test_triton_recurrent_rows import one_token  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
HALF = torch.bfloat16
CLOSE = {torch.float32: 1e-5, HALF: 1e-2}
DRAFTS = 3
OF_EACH = [MAMBA2[1], DELTA[1]]  # groups and shared keys, sizes that are no powers of two
ONE_GROUP = next(shape for shape in MAMBA2 if shape.groups == 1)
OTHERS = [pytest.param(shape, marks=pytest.mark.large) for shape in (*MAMBA2, *DELTA) if shape not in OF_EACH]
# Launches of which each goes on from the one before: rows that decode with up to three drafts, of which some are kept,
# launches without any, a row that begins, a masked one, and a row with a chunk, which is somebody else's.
LIFE = (
    (Row(2, 7, 4, drafts=3), Row(0, 0, 1), Row(4, 1, 2, drafts=1), Row(1, 5, 3, drafts=2, alive=False)),
    (Row(0, 1, 4, drafts=3), Row(2, 10, 2, drafts=1, replayed=2), Row(4, 2, 1)),
    (Row(2, 11, 1), Row(4, 3, 3, drafts=2), Row(0, 5, 1, replayed=3)),
    (Row(4, 6, 1, replayed=2), Row(2, 12, 4, drafts=3), Row(0, 6, 1)),
)


def runs(
    mixer: Mixer,
    projected: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    rows: Sequence[Row],
    queries: int = 0,
    tiling: StateTiling = STATES,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """By the kernel. states: on the device, changed in place. queries: of a row, at most; 0: as many as a row has.
    squares: as `mamba2_of_decode_rows` has them."""
    batch = batch_of(rows)
    batch = moved(replace(batch, decode_queries=queries or batch.decode_queries), DEVICE)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    out = torch.empty((len(projected), mixer.shape.inner), dtype=projected.dtype, device=DEVICE)
    weights = moved(mixer, DEVICE)
    if isinstance(mixer, Mamba2):
        mamba2_decode.mamba2_of_decode_rows(
            projected.to(DEVICE), weights, states, batch, out, arrived, dependent=False, squares=squares, tiling=tiling
        )
    else:
        delta_of_decode_rows(projected.to(DEVICE), weights, states, batch, out, arrived, dependent=False, tiling=tiling)
    assert not arrived.any()
    return out.cpu()


def fresh(mixer: Mixer) -> tuple[torch.Tensor, ...]:
    return moved(with_runs(mixer, held_states(mixer), DRAFTS), DEVICE)


def are_as_expected(states: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    *of_rows, kept = states
    *expected_of_rows, expected_kept = expected
    for one, other in zip(of_rows, expected_of_rows, strict=True):
        assert relative_error(one, other) < 1e-5, "states are float32, whatever the dtype"
    assert torch.equal(kept.cpu().nan_to_num(7.0), expected_kept.nan_to_num(7.0)), "inputs are kept as they are"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(HALF, marks=pytest.mark.large)])
@pytest.mark.parametrize("shape", [*OF_EACH, *OTHERS])
def test_launches_one_after_the_other_are_those_of_the_reference(
    shape: Mamba2Shape | DeltaShape, dtype: torch.dtype
) -> None:
    mixer = mixer_of(shape, dtype)
    expected_states, states = with_runs(mixer, held_states(mixer), DRAFTS), fresh(mixer)
    for seed, rows in enumerate(LIFE):
        projected = drawn(sum(row.count for row in rows), shape, dtype, seed=seed)
        expected = by_the_reference(mixer, projected, expected_states, rows)
        found = runs(mixer, projected, states, rows)
        assert found.isfinite().all()
        assert relative_error(found, expected) < CLOSE[dtype]
    are_as_expected(states, expected_states)


@pytest.mark.parametrize("shape", OF_EACH)
def test_a_row_whose_heads_are_cut_into_several_programs_goes_through_its_life(
    shape: Mamba2Shape | DeltaShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a lone row's heads of models are; these are smaller. Registers are taken to hold the outputs of one token."""
    monkeypatch.setattr(mamba2_decode, "_MOST_OF_A_THREAD", 0)
    mixer, tiling = mixer_of(shape), StateTiling(LONE_RUN.words // 8, LONE_RUN.warps)
    size, kept_of_each = (
        (shape.head_dim, shape.state) if isinstance(shape, Mamba2Shape) else (shape.value_dim, shape.key_dim)
    )
    assert tiling.tile(size, kept_of_each) < size
    expected_states, states = with_runs(mixer, held_states(mixer), DRAFTS), fresh(mixer)
    for seed, row in enumerate(row for rows in LIFE for row in rows if row.state_slot == LIFE[0][0].state_slot):
        projected = drawn(row.count, shape, seed=seed)
        expected = by_the_reference(mixer, projected, expected_states, [row])
        assert relative_error(runs(mixer, projected, states, [row], tiling=tiling), expected) < 1e-5
    assert seed == len(LIFE) - 1
    are_as_expected(states, expected_states)


@pytest.mark.large
def test_steps_are_limited_and_a_convolution_may_have_no_bias() -> None:
    mixer = mamba2(MAMBA2[0], torch.float32, bias=False, limits=(0.1, 0.5))
    expected_states, states = with_runs(mixer, held_states(mixer), DRAFTS), fresh(mixer)
    for seed, rows in enumerate(LIFE[:2]):
        projected = drawn(sum(row.count for row in rows), mixer.shape, seed=seed)
        expected = by_the_reference(mixer, projected, expected_states, rows)
        assert relative_error(runs(mixer, projected, states, rows), expected) < 1e-5


@pytest.mark.parametrize("shape", OF_EACH)
def test_a_token_has_the_bits_that_it_has_without_drafts_as_a_draft_and_when_it_is_replayed(
    shape: Mamba2Shape | DeltaShape,
) -> None:
    """Six tokens one after the other, by the kernel of rows without drafts; and as runs with drafts that miss. A border
    lies inside what is replayed, and one behind the newest token."""
    mixer, tokens = mixer_of(shape), drawn(6, shape)
    alone = moved(held_states(mixer), DEVICE)
    outputs, after = [], []
    for place in range(6):
        outputs.append(one_token(mixer, tokens[place : place + 1], alone, [Row(2, 9 + place, 1)]))
        after.append([tensor[2].clone() for tensor in alone])
    wrong, states = drawn(3, shape, seed=5), fresh(mixer)
    first = runs(mixer, torch.cat([tokens[:3], wrong[:1]]), states, [Row(2, 9, 4, drafts=3)])
    assert torch.equal(first[:3], torch.cat(outputs[:3]))
    assert all(torch.equal(one[2], other) for one, other in zip(states, after[0], strict=False)), "no draft is in it"
    border = Row(2, 12, 3, drafts=2, replayed=2, left_in=5, left_after=1)
    second = runs(mixer, torch.cat([tokens[3:4], wrong[1:]]), states, [border])
    assert torch.equal(second[:1], outputs[3])
    assert all(torch.equal(one[2], other) for one, other in zip(states, after[3], strict=False))
    assert all(torch.equal(one[5], other) for one, other in zip(states, after[1], strict=False)), "a border in a run"
    third = runs(mixer, tokens[4:5], states, [Row(2, 13, 1, left_in=3)])
    assert torch.equal(third, outputs[4]), "none of its drafts was kept"
    assert all(torch.equal(one[3], other) for one, other in zip(states, after[4], strict=False)), "a border behind it"
    fourth = runs(mixer, tokens[5:], states, [Row(2, 14, 1, begins_as=3)])
    assert torch.equal(fourth, outputs[5])
    assert all(torch.equal(one[2], other) for one, other in zip(states, after[5], strict=False))


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside a row"])
def test_a_token_of_a_run_leaves_the_squares_that_it_leaves_without_drafts(others: int) -> None:
    """Two replayed tokens, the newest and a draft, in one program for each head and in several."""
    mixer = mixer_of(ONE_GROUP)
    tokens, alone = drawn(4, ONE_GROUP), moved(held_states(mixer), DEVICE)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def squares() -> torch.Tensor:
        return torch.full((ONE_GROUP.inner, 8), torch.nan, dtype=torch.float64, device=DEVICE)

    for place in range(4):
        left = squares()
        out = one_token(mixer, tokens[place : place + 1], alone, [Row(2, 9 + place, 1)], squares=left, scaled=False)
        found.append((out[0], left[:, 0].nansum()))
    for tiling in (STATES, StateTiling(LONE_RUN.words // 16, LONE_RUN.warps)):
        states = fresh(mixer)
        runs(mixer, tokens[[0, 1, 2]], states, [Row(2, 9, 3, drafts=2)], tiling=tiling)
        rows, left = [Row(2, 12, 1, replayed=2), Row(0, 3, 2, drafts=1)][: 1 + others], squares()
        out = runs(mixer, torch.cat([tokens[3:], tokens[: 2 * others]]), states, rows, 2, tiling, left)
        assert torch.equal(out[0], found[3][0]) and left[:, 0].nansum() == found[3][1]
        first, left = fresh(mixer), squares()
        rows = [Row(2, 9, 2, drafts=1), Row(0, 3, 1)][: 1 + others]
        out = runs(mixer, tokens[: 2 + others], first, rows, tiling=tiling, squares=left)
        assert all(torch.equal(out[place], found[place][0]) for place in range(2))
        assert all(left[:, place].nansum() == found[place][1] for place in range(2))


@pytest.mark.parametrize("drafts", [1, 3])
def test_a_lone_row_whose_tokens_are_rows_elsewhere_has_room_for_the_squares_of_each_program(drafts: int) -> None:
    mixer, like = mixer_of(ONE_GROUP), torch.empty((8, 8), dtype=torch.float64, device=DEVICE)
    row = batch_of([Row(2, 9, 1 + drafts, drafts=drafts)])
    lines = replace(row, num_rows=1 + drafts, decode_queries=1, in_rows=row)
    rooms = [squares_of_norm(mixer, batch, like, ONE_RANK) for batch in (row, lines)]
    assert [room is not None and room.shape for room in rooms] == [(ONE_GROUP.inner, 8)] * 2


@pytest.mark.parametrize("shape", OF_EACH)
def test_masked_rows_and_chunks_leave_states_and_kept_inputs_as_they_are(shape: Mamba2Shape | DeltaShape) -> None:
    mixer, states = mixer_of(shape), fresh(mixer_of(shape))
    states[2].normal_(generator=torch.Generator(DEVICE).manual_seed(3))
    before = [tensor.cpu().clone() for tensor in states]
    projected = drawn(9, shape)
    projected[[2, 3, 4]] = torch.nan
    rows = [
        Row(3, 9, 2, drafts=1, replayed=1), Row(1, 6, 2, drafts=1, replayed=2, alive=False),
        Row(4, 8, 1, replayed=3, alive=False), Row(2, 5, 4),
    ]  # fmt: skip
    found = runs(mixer, projected, states, rows, queries=2)
    assert found[:2].isfinite().all()
    assert found[2:5].eq(0).all(), "masked rows leave zeros"
    assert found[5:].isnan().all(), "a chunk is somebody else's"
    for tensor, was in zip(states, before, strict=True):
        others = [slot for slot in range(len(was)) if slot != 3]
        assert torch.equal(tensor.cpu()[others], was[others])
        assert not torch.equal(tensor.cpu()[3], was[3])
    assert torch.equal(states[2].cpu()[3, 1:], before[2][3, 1:]), "there was one draft"


@pytest.mark.large
@pytest.mark.parametrize("shape", OF_EACH)
def test_neighbours_change_no_bit(shape: Mamba2Shape | DeltaShape) -> None:
    mixer = mixer_of(shape, HALF)
    together = fresh(mixer)
    together[2].normal_(generator=torch.Generator(DEVICE).manual_seed(3))
    before = [tensor.clone() for tensor in together]
    rows = LIFE[1]
    projected = drawn(sum(row.count for row in rows), shape, HALF)
    found, first = runs(mixer, projected, together, rows), 0
    for row in rows:
        mine = slice(first, first + row.count)
        first += row.count
        states = tuple(tensor.clone() for tensor in before)
        assert torch.equal(runs(mixer, projected[mine], states, [row]), found[mine])
        for one, other in zip(states, together, strict=True):
            assert torch.equal(one[row.state_slot], other[row.state_slot])
