"""The gated delta net on the CPU is the recurrence of its definition."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from tests.runtime.kernels.recurrent_batches import Row
from tests.runtime.kernels.recurrent_layers import SLOTS, DeltaLayer, residual_of


def expected(layer: DeltaLayer, residual: NDArray[np.float32]) -> NDArray[np.float64]:
    """The definition, token by token and head by head, in float64."""
    weights, shape = layer.weights, layer.shape
    x = torch.from_numpy(residual).double()
    x = x / torch.sqrt((x * x).mean(1, keepdim=True) + layer.eps)
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
    y = y / torch.sqrt((y * y).mean(2, keepdim=True) + layer.eps) * weights.gated_norm.weight.double()
    found: NDArray[np.float64] = ((y.flatten(1) * functional.silu(z)) @ layer.out.double().t()).numpy()
    return found


def test_it_is_the_recurrence_of_its_definition() -> None:
    layer, residual = DeltaLayer(), residual_of(19)
    found = layer.added(residual, [Row(2, 0, 19)])
    np.testing.assert_allclose(found, expected(layer, residual), rtol=2e-4, atol=2e-4)
    assert [tensor.shape for tensor in layer.states[:2]] == [(SLOTS, 3, layer.shape.channels), (SLOTS, 6, 8, 12)]
