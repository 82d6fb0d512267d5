"""The reference's gated delta net: the recurrence, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.layers import DeltaShape, GatedDelta
from runahead.runtime.kernels.reference.linear import Product, Products, bound_product
from runahead.runtime.kernels.reference.ops import NormWeight, silu_mul
from runahead.runtime.kernels.reference.recurrence import Convolution, RecurrentBuffers, RowTokens, softplus

# Floats are float32. A tensor and an array of one name share memory. n tokens of m live rows.

_EPS = np.float32(1e-6)  # added to a key's squared length


@dataclass(frozen=True, slots=True)
class BoundDelta:
    """A layer's weights in NumPy."""

    shape: DeltaShape
    proj: Product
    out: Product
    convolution: Convolution
    a: NDArray[np.float32]  # [value_heads]
    dt_bias: NDArray[np.float32]  # [value_heads]
    gated_norm: NormWeight

    @staticmethod
    def of(weights: GatedDelta, products: Products) -> BoundDelta:
        return BoundDelta(
            weights.shape,
            bound_product(products, weights.proj),
            bound_product(products, weights.out),
            Convolution(np.ascontiguousarray(weights.conv_weight.float().numpy()[:, 0].T), None),
            weights.a.float().numpy(),
            weights.dt_bias.float().numpy(),
            NormWeight.of(weights.gated_norm),
        )

    def mix(
        self,
        normed: tuple[torch.Tensor, ...],
        own: RecurrentBuffers,
        runs: RowTokens,
        states: list[NDArray[np.float32]],
    ) -> tuple[torch.Tensor, ...]:
        """Compute the mixer up to the input of `out`. normed: the residual's norm. states: the mixer's `Kept.state` by
        state slot, followed by the runs' saved inputs.

        Tokens of masked rows give zeros.
        """
        shape = self.shape
        self.proj.write(normed, own.projected)
        projected = own.projected.numpy()
        inputs = runs.gather(projected[runs.tokens, shape.inner :], states[2])
        convolved = self.convolution.apply(runs, inputs[:, : shape.channels], states[0])
        b, dt = inputs[:, shape.channels :].reshape(-1, 2, shape.value_heads).swapaxes(0, 1)
        own.y[:] = 0.0
        own.y[runs.tokens] = self._scan(runs, convolved, b, dt, states[1])[runs.own]
        own.norm.apply(self.gated_norm)
        silu_mul(projected[:, : shape.inner], own.y, own.gated)
        return own.gated_parts

    def _scan(
        self, runs: RowTokens, convolved: NDArray[np.float32], b: NDArray[np.float32], dt: NDArray[np.float32],
        state: NDArray[np.float32],
    ) -> NDArray[np.float32]:  # fmt: skip
        """Run the recurrence. convolved: [n, channels]. b, dt: [n, value_heads], as projected. Returns y, [n,
        inner].
        """
        shape = self.shape
        each = shape.value_heads // shape.key_heads
        by_value = (-1, shape.key_heads, each)
        q, k = convolved[:, : 2 * shape.keys].reshape(-1, 2, shape.key_heads, shape.key_dim).swapaxes(0, 1)
        q = (_divided_by_length(q) / np.float32(shape.key_dim**0.5))[:, :, None, None]
        k = _divided_by_length(k)[:, :, None, None]
        v = convolved[:, 2 * shape.keys :].reshape(*by_value, shape.value_dim)
        decay = np.exp(softplus(dt + self.dt_bias) * self.a).reshape(*by_value, 1, 1)
        beta = (np.float32(1.0) / (np.exp(-b) + np.float32(1.0))).reshape(*by_value, 1)
        y = np.empty(v.shape, np.float32)
        held = runs.begin(state).reshape(*by_value, shape.value_dim, shape.key_dim)
        writes = runs.writes.by_step()
        for step, (rows, indexes) in enumerate(runs.steps()):
            now, key = held[:rows], k[indexes]
            now *= decay[indexes]
            known = np.einsum("rghvk,rghvk->rghv", now, np.broadcast_to(key, now.shape))
            now += (beta[indexes] * (v[indexes] - known))[..., None] * key
            y[indexes] = np.einsum("rghvk,rghvk->rghv", now, np.broadcast_to(q[indexes], now.shape))
            if step in writes:
                left, slots = writes[step]
                state[slots] = held[left].reshape(-1, *state.shape[1:])
        return y.reshape(-1, shape.inner)


def _divided_by_length(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalize vectors to unit length. x: [n, heads, key_dim]"""
    x = np.ascontiguousarray(x)
    squares = np.einsum("nhk,nhk->nh", x, x)
    found: NDArray[np.float32] = x / np.sqrt(squares + _EPS)[..., None]
    return found
