"""The gated delta net on the CPU: the recurrence of its definition, whose bits hang on the row alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from runahead.runtime.kernels.layers import DeltaShape, GatedDelta, Linear, Norm
from runahead.runtime.kernels.reference.buffers import Buffers
from runahead.runtime.kernels.reference.gated_delta import BoundDelta, DeltaBuffers
from runahead.runtime.kernels.reference.linear import Products, choose_products
from runahead.runtime.kernels.reference.norm import NormWeight
from runahead.runtime.kernels.reference.recurrence import row_tokens_of
from tests.runtime.kernels.recurrent_batches import Row, batch_of

HIDDEN, EPS, SLOTS = 24, 1e-2, 5
DRAFTS = 3
SHAPE = DeltaShape(key_heads=2, key_dim=12, value_heads=6, value_dim=8, window=4)


class Layer:
    """A gated delta net with random weights, and what it adds to rows of a residual. Freed slots hold NaN."""

    def __init__(self) -> None:
        self.products: Products = choose_products()
        draw = torch.Generator().manual_seed(4)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw)

        self.proj = numbers(SHAPE.inner + SHAPE.channels + 2 * SHAPE.value_heads, HIDDEN)
        self.out = numbers(HIDDEN, SHAPE.inner)
        self.weights = GatedDelta(
            SHAPE,
            norm=Norm(torch.ones(HIDDEN), EPS),
            proj=Linear(self.products.pack(self.proj), None),
            conv_weight=numbers(SHAPE.channels, 1, SHAPE.window),
            a=-numbers(SHAPE.value_heads).exp(),
            dt_bias=numbers(SHAPE.value_heads),
            gated_norm=Norm(1.0 + 0.1 * numbers(SHAPE.value_dim), EPS),
            out=Linear(self.products.pack(self.out), None),
        )
        self.bound = BoundDelta.of(self.weights, self.products)
        kept = self.weights.keeps
        self.states = [np.full((SLOTS, *shape), np.nan, np.float32) for shape in (*kept.state, (DRAFTS, kept.inputs))]

    def added(self, residual: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float32]:
        """residual: [n, HIDDEN]. Everything that nobody may read is NaN beforehand."""
        count = len(residual)
        tokens = count + -count % self.products.row_multiple
        buffers = Buffers.make(tokens, HIDDEN, self.products)
        own = DeltaBuffers.make(tokens, SHAPE, self.products)
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
    sizes = [shape.inner, shape.channels, shape.value_heads, shape.value_heads]
    z, channels, b, dt = (x @ layer.proj.double().t()).split(sizes, 1)
    taps = weights.conv_weight.double()
    convolved = functional.conv1d(channels.t()[None], taps, padding=shape.window - 1, groups=shape.channels)
    convolved = functional.silu(convolved[0, :, : len(x)].t())
    q, k, v = convolved.split([shape.keys, shape.keys, shape.inner], 1)
    decay = torch.exp(functional.softplus(dt + weights.dt_bias.double()) * weights.a.double())
    y = torch.zeros(len(x), shape.value_heads, shape.value_dim, dtype=torch.float64)
    for head in range(shape.value_heads):
        of_keys = head // (shape.value_heads // shape.key_heads)
        state = torch.zeros(shape.value_dim, shape.key_dim, dtype=torch.float64)
        for token in range(len(x)):
            query, key = (one[token].view(shape.key_heads, -1)[of_keys] for one in (q, k))
            query, key = (one / torch.sqrt((one * one).sum() + 1e-6) for one in (query, key))
            state = decay[token, head] * state
            change = torch.sigmoid(b[token, head]) * (v[token].view(shape.value_heads, -1)[head] - state @ key)
            state = state + torch.outer(change, key)
            y[token, head] = state @ query / shape.key_dim**0.5
    y = y / torch.sqrt((y * y).mean(2, keepdim=True) + EPS) * weights.gated_norm.weight.double()
    found: NDArray[np.float64] = ((y.flatten(1) * functional.silu(z)) @ layer.out.double().t()).numpy()
    return found


def test_it_is_the_recurrence_of_its_definition() -> None:
    layer, residual = Layer(), residual_of(19)
    found = layer.added(residual, [Row(2, 0, 19)])
    np.testing.assert_allclose(found, expected(layer, residual), rtol=2e-4, atol=2e-4)
    assert [tensor.shape for tensor in layer.states[:2]] == [(SLOTS, 3, SHAPE.channels), (SLOTS, 6, 8, 12)]


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
    layer, other = Layer(), residual_of(9, seed=1)
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
