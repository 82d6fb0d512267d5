"""What recurrent mixers of the reference share: who goes on with which state, and a convolution over tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from runahead.runtime.kernels.reference.recurrence import Convolution, row_tokens_of, silu, softplus
from tests.runtime.kernels.recurrent_batches import Row, batch_of

CHANNELS, WINDOW = 5, 4


def drawn(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rows_go_on_one_token_at_a_time_the_longest_first_and_masked_rows_not_at_all() -> None:
    rows = [Row(4, 7, 1), Row(1, 0, 3), Row(3, 5, 2, alive=False), Row(0, 2, 2), Row(2, 0, 1)]
    runs = row_tokens_of(batch_of(rows))
    assert runs.read_from.tolist() == runs.writes.slots.tolist() == [1, 0, 4, 2]
    assert runs.fresh.tolist() == [True, False, False, True]
    assert runs.tokens.tolist() == [1, 2, 3, 6, 7, 0, 8]
    steps = [(count, runs.tokens[places].tolist()) for count, places in runs.steps()]
    assert steps == [(4, [1, 6, 0, 8]), (2, [2, 7]), (1, [3])]


def test_where_every_row_is_masked_nothing_goes_on() -> None:
    runs = row_tokens_of(batch_of([Row(0, 3, 1, alive=False), Row(1, 0, 2, alive=False)]))
    assert list(runs.steps()) == []
    assert runs.tokens.size == 0


def test_a_row_that_begins_finds_zeros_and_its_slot_keeps_what_it_held() -> None:
    state = np.full((3, 2), np.nan, np.float32)
    state[1] = 5.0
    runs = row_tokens_of(batch_of([Row(2, 0, 1), Row(1, 4, 1)]))
    mine = runs.begin(state)
    assert mine.tolist() == [[0.0, 0.0], [5.0, 5.0]]
    mine += 1.0
    assert np.isnan(state[2]).all() and state[1].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("chunks", [(11,), (1,) * 11, (3, 1, 2, 5), (2, 9)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_is_torch_s_however_the_tokens_are_cut(chunks: tuple[int, ...], bias: bool) -> None:
    x, weight = drawn(11, CHANNELS), drawn(WINDOW, CHANNELS, seed=1)
    own = Convolution(weight, drawn(CHANNELS, seed=2) if bias else None)
    padded = torch.from_numpy(x.T.copy())[None]
    taps = torch.from_numpy(weight.T.copy())[:, None]
    given = None if own.bias is None else torch.from_numpy(own.bias)
    expected = functional.silu(functional.conv1d(padded, taps, given, padding=WINDOW - 1, groups=CHANNELS))[0, :, :11]
    state = np.full((3, WINDOW - 1, CHANNELS), np.nan, np.float32)
    whole = own.apply(row_tokens_of(batch_of([Row(0, 0, 11)])), x, state)
    np.testing.assert_allclose(whole, expected.numpy().T, rtol=1e-5, atol=1e-6)
    first, parts = 0, []
    for count in chunks:
        neighbour = Row(0, first, count)  # another row with the same tokens, in another slot
        runs = row_tokens_of(batch_of([Row(2, first, count), neighbour]))
        both = own.apply(runs, np.concatenate([x[first : first + count]] * 2), state)
        np.testing.assert_array_equal(both[:count], both[count:])
        parts.append(both[:count])
        first += count
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(state[2], x[-WINDOW + 1 :])
    assert np.isnan(state[1]).all()


def test_silu_and_softplus_are_finite_far_from_zero() -> None:
    far = np.array([-1e30, -100.0, 0.0, 100.0, 1e30], np.float32)
    with np.errstate(over="ignore"):  # as a forward computes
        np.testing.assert_allclose(silu(far), [0.0, 0.0, 0.0, 100.0, 1e30], atol=1e-30)
        np.testing.assert_allclose(softplus(far), [0.0, 0.0, np.log(2.0), 100.0, 1e30], rtol=1e-6, atol=1e-30)


def test_a_row_begins_with_another_s_state_and_leaves_its_own_in_two_places() -> None:
    rows = [Row(0, 7, 1), Row(1, 0, 2), Row(2, 4, 1, alive=False)]
    batch = replace(
        batch_of(rows),
        states_read_from=torch.tensor([5, 0, 3], dtype=torch.int32),
        states_copied_to=torch.tensor([-1, 3, 4], dtype=torch.int32),
        copied_after=torch.tensor([0, 1, 1], dtype=torch.int32),
    )
    runs = row_tokens_of(batch)
    assert runs.begin(np.arange(6, dtype=np.float32)).tolist() == [0.0, 5.0], "the longer run first: it begins"
    written = {step: (rows.tolist(), slots.tolist()) for step, (rows, slots) in runs.writes.by_step().items()}
    assert written == {0: ([1, 0], [0, 3]), 1: ([0], [1])}, "a masked row leaves nothing anywhere"


def test_kept_drafts_come_before_a_row_s_tokens_and_new_ones_are_kept() -> None:
    runs = row_tokens_of(batch_of([Row(3, 9, 3, replayed=2, drafts=2), Row(1, 4, 1), Row(0, 20, 2, replayed=1)]))
    kept = np.arange(12, dtype=np.float32).reshape(4, 3, 1)  # by slot, as the launch before has left them
    mine = 100.0 + np.arange(6, dtype=np.float32)[:, None]
    by_row = [[9.0, 10.0, 100.0, 101.0, 102.0], [0.0, 104.0, 105.0], [103.0]]
    found = runs.gather(mine[runs.tokens], kept)[:, 0]
    parts = zip(runs.begins, runs.counts, strict=True)
    assert [found[begin : begin + count].tolist() for begin, count in parts] == by_row
    assert found[runs.own].tolist() == mine[runs.tokens, 0].tolist()
    assert kept[3, :, 0].tolist() == [101.0, 102.0, 11.0], "the two drafts of the first row, and no others"
    assert kept[:3, :, 0].tolist() == np.arange(9).reshape(3, 3).tolist()
    written = {step: (rows.tolist(), slots.tolist()) for step, (rows, slots) in runs.writes.by_step().items()}
    assert written == {2: ([0, 1], [3, 0]), 0: ([2], [1])}, "behind the newest token, which is certain, or the last one"
