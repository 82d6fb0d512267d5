"""Mamba-2 on the CPU is the recurrence of its definition."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from tests.runtime.kernels.recurrent_batches import Row
from tests.runtime.kernels.recurrent_layers import LIMITS, SLOTS, Mamba2Layer, residual_of


def expected(layer: Mamba2Layer, residual: NDArray[np.float32]) -> NDArray[np.float64]:
    """The definition, token by token and head by head, in float64."""
    weights, shape = layer.weights, layer.shape
    x = torch.from_numpy(residual).double()
    x = x / torch.sqrt((x * x).mean(1, keepdim=True) + layer.eps)
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
    gated = gated / torch.sqrt((gated * gated).mean(2, keepdim=True) + layer.eps)
    found: NDArray[np.float64] = (
        gated.flatten(1) * weights.gated_norm.weight.double() @ layer.out.double().t()
    ).numpy()
    return found


def test_it_is_the_recurrence_of_its_definition() -> None:
    layer, residual = Mamba2Layer(), residual_of(19)
    found = layer.added(residual, [Row(2, 0, 19)])
    np.testing.assert_allclose(found, expected(layer, residual), rtol=2e-4, atol=2e-4)
    assert [tensor.shape for tensor in layer.states[:2]] == [(SLOTS, 3, layer.shape.channels), (SLOTS, 6, 8, 16)]


def test_a_number_that_is_none_stays_in_its_row() -> None:
    layer, residual = Mamba2Layer(), residual_of(8)
    alone = Mamba2Layer().added(residual[4:], [Row(0, 0, 4)])
    residual[1] = np.inf
    found = layer.added(residual, [Row(2, 0, 4), Row(1, 0, 4)])
    np.testing.assert_array_equal(found[4:], alone)
    assert not np.isfinite(found[1]).any() and not np.isfinite(found[3]).all()
