"""Mamba-2 on the CPU: the recurrence of its definition, whose bits hang on the row alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from runahead.runtime.kernels.layers import Linear, Mamba2, Mamba2Shape, Norm
from runahead.runtime.kernels.reference.buffers import Buffers
from runahead.runtime.kernels.reference.linear import Products, choose_products
from runahead.runtime.kernels.reference.mamba2 import BoundMamba2, Mamba2Buffers
from runahead.runtime.kernels.reference.norm import NormWeight
from runahead.runtime.kernels.reference.recurrence import row_tokens_of
from tests.runtime.kernels.recurrent_batches import Row, batch_of

HIDDEN, EPS, SLOTS = 24, 1e-5, 5
DRAFTS = 3
SHAPE = Mamba2Shape(heads=6, head_dim=8, groups=2, state=16, window=4)
LIMITS = (0.02, 1.0)


class Layer:
    """Mamba-2 with random weights, and what it adds to rows of a residual. Freed slots hold NaN."""

    def __init__(self) -> None:
        self.products: Products = choose_products()
        draw = torch.Generator().manual_seed(3)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw)

        self.proj, self.out = numbers(SHAPE.inner + SHAPE.channels + SHAPE.heads, HIDDEN), numbers(HIDDEN, SHAPE.inner)
        self.weights = Mamba2(
            SHAPE,
            norm=Norm(torch.ones(HIDDEN), EPS),
            proj=Linear(self.products.pack(self.proj), None),
            conv_weight=numbers(SHAPE.channels, 1, SHAPE.window),
            conv_bias=numbers(SHAPE.channels),
            a=-numbers(SHAPE.heads).exp(),
            d=numbers(SHAPE.heads),
            dt_bias=numbers(SHAPE.heads),
            dt_limits=LIMITS,
            gated_norm=Norm(1.0 + 0.1 * numbers(SHAPE.inner), EPS),
            out=Linear(self.products.pack(self.out), None),
        )
        self.bound = BoundMamba2.of(self.weights, self.products)
        kept = self.weights.keeps
        self.states = [np.full((SLOTS, *shape), np.nan, np.float32) for shape in (*kept.state, (DRAFTS, kept.inputs))]

    def added(self, residual: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float32]:
        """residual: [n, HIDDEN]. Everything that nobody may read is NaN beforehand."""
        count = len(residual)
        tokens = count + -count % self.products.row_multiple
        buffers = Buffers.make(tokens, HIDDEN, self.products)
        own = Mamba2Buffers.make(tokens, SHAPE, self.products)
        own.y[:], own.gated[:] = np.nan, np.nan
        own.projected.fill_(float("nan"))
        buffers.residual_array[:count] = residual
        with np.errstate(all="ignore"):  # as a forward computes
            buffers.norm.apply(NormWeight.of(self.weights.norm))
            parts = self.bound.mix(buffers.normed_parts, own, row_tokens_of(batch_of(rows)), self.states)
        buffers.residual_array[:] = 0.0
        self.bound.out.add(parts, buffers.residual)
        return buffers.residual_array[:count].copy()


def residual_of(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def expected(layer: Layer, residual: NDArray[np.float32]) -> NDArray[np.float64]:
    """The definition, token by token and head by head, in float64."""
    weights, shape = layer.weights, SHAPE
    x = torch.from_numpy(residual).double()
    x = x / torch.sqrt((x * x).mean(1, keepdim=True) + EPS)
    z, channels, dt = (x @ layer.proj.double().t()).split([shape.inner, shape.channels, shape.heads], 1)
    assert weights.conv_bias is not None
    taps, bias = weights.conv_weight.double(), weights.conv_bias.double()
    convolved = functional.conv1d(channels.t()[None], taps, bias, padding=shape.window - 1, groups=shape.channels)
    convolved = functional.silu(convolved[0, :, : len(x)].t())
    share = shape.groups * shape.state
    inputs, b, c = convolved.split([shape.inner, share, share], 1)
    steps = functional.softplus(dt + weights.dt_bias.double()).clamp(*LIMITS)
    y = torch.zeros(len(x), shape.heads, shape.head_dim, dtype=torch.float64)
    for head in range(shape.heads):
        group = slice(head // (shape.heads // shape.groups) * shape.state, None)
        state = torch.zeros(shape.head_dim, shape.state, dtype=torch.float64)
        for token in range(len(x)):
            mine = inputs[token].view(shape.heads, shape.head_dim)[head]
            step = steps[token, head]
            state = torch.exp(step * weights.a[head].double()) * state
            state = state + step * torch.outer(mine, b[token, group][: shape.state])
            y[token, head] = state @ c[token, group][: shape.state] + weights.d[head].double() * mine
    gated = (y.flatten(1) * functional.silu(z)).view(len(x), shape.groups, -1)
    gated = gated / torch.sqrt((gated * gated).mean(2, keepdim=True) + EPS)
    found: NDArray[np.float64] = (
        gated.flatten(1) * weights.gated_norm.weight.double() @ layer.out.double().t()
    ).numpy()
    return found


def test_it_is_the_recurrence_of_its_definition() -> None:
    layer, residual = Layer(), residual_of(19)
    found = layer.added(residual, [Row(2, 0, 19)])
    np.testing.assert_allclose(found, expected(layer, residual), rtol=2e-4, atol=2e-4)
    assert [tensor.shape for tensor in layer.states[:2]] == [(SLOTS, 3, SHAPE.channels), (SLOTS, 6, 8, 16)]


@pytest.mark.parametrize("chunks", [(1,) * 19, (8, 8, 3), (1, 17, 1), (5, 1, 1, 12)])
def test_a_state_is_handed_from_chunk_to_chunk_and_no_cut_changes_a_bit(chunks: tuple[int, ...]) -> None:
    whole, cut, residual = Layer(), Layer(), residual_of(19)
    alone = whole.added(residual, [Row(0, 0, 19)])
    first, parts = 0, []
    for count in chunks:
        parts.append(cut.added(residual[first : first + count], [Row(4, first, count)]))
        first += count
    np.testing.assert_array_equal(np.concatenate(parts), alone)
    for one, other in zip(whole.states, cut.states, strict=True):
        np.testing.assert_array_equal(one[0], other[4])


def test_neighbours_change_no_bit_whatever_they_bring() -> None:
    layer, residual = Layer(), residual_of(12)
    alone = layer.added(residual, [Row(0, 0, 12)])
    layer = Layer()
    other = residual_of(9, seed=1)
    layer.added(other[:4], [Row(3, 0, 4)])
    first = layer.added(np.concatenate([other[4:5], residual[:7], other]), [Row(3, 4, 1), Row(1, 0, 7), Row(0, 0, 9)])
    rest = layer.added(np.concatenate([residual[7:], other[5:6]]), [Row(1, 7, 5), Row(3, 5, 1)])
    np.testing.assert_array_equal(np.concatenate([first[1:8], rest[:5]]), alone)


def test_a_masked_row_leaves_every_state_as_it_is_and_its_numbers_reach_nobody() -> None:
    layer, residual = Layer(), residual_of(6)
    layer.added(residual, [Row(1, 0, 6)])
    before = [tensor.copy() for tensor in layer.states]
    broken = np.full((3, HIDDEN), np.nan, np.float32)
    added = layer.added(np.concatenate([broken, residual[:1]]), [Row(1, 6, 3, alive=False), Row(2, 0, 1)])
    for tensor, was in zip(layer.states, before, strict=True):
        np.testing.assert_array_equal(tensor[1], was[1])
    np.testing.assert_array_equal(added[3:], Layer().added(residual[:1], [Row(0, 0, 1)]))


def test_a_row_that_begins_does_not_see_what_its_slot_holds() -> None:
    layer, residual = Layer(), residual_of(5)
    once = layer.added(residual, [Row(0, 0, 5)])
    assert np.isfinite(once).all()
    np.testing.assert_array_equal(layer.added(residual, [Row(0, 0, 5)]), once)


def test_a_number_that_is_none_stays_in_its_row() -> None:
    layer, residual = Layer(), residual_of(8)
    alone = Layer().added(residual[4:], [Row(0, 0, 4)])
    residual[1] = np.inf
    found = layer.added(residual, [Row(2, 0, 4), Row(1, 0, 4)])
    np.testing.assert_array_equal(found[4:], alone)
    assert not np.isfinite(found[1]).any() and not np.isfinite(found[3]).all()


@pytest.mark.parametrize("kept", range(DRAFTS + 1))
def test_drafts_that_were_kept_are_replayed_and_those_that_were_not_leave_nothing(kept: int) -> None:
    residual = residual_of(14)
    alone = Layer().added(residual, [Row(0, 0, 14)])
    layer, wrong = Layer(), residual_of(DRAFTS, seed=1)
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
