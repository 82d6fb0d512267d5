"""The reference's Mamba-2: the recurrence, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.layers import Mamba2, Mamba2Shape
from runahead.runtime.kernels.reference.linear import Product, Products, bound_product
from runahead.runtime.kernels.reference.ops import NormWeight, silu_mul
from runahead.runtime.kernels.reference.recurrence import Convolution, RecurrentBuffers, RowTokens, softplus

# Floats are float32. A tensor and an array of one name share memory. n tokens of m live rows.


@dataclass(frozen=True, slots=True)
class BoundMamba2:
    """A layer's weights in NumPy."""

    shape: Mamba2Shape
    proj: Product
    out: Product
    convolution: Convolution
    a: NDArray[np.float32]  # [heads]
    d: NDArray[np.float32]  # [heads, 1]
    dt_bias: NDArray[np.float32]  # [heads]
    dt_limits: tuple[np.float32, np.float32]
    gated_norm: NormWeight  # weight [groups, inner / groups]

    @staticmethod
    def of(weights: Mamba2, products: Products) -> BoundMamba2:
        low, high = weights.dt_limits
        norm = NormWeight.of(weights.gated_norm)
        return BoundMamba2(
            weights.shape,
            bound_product(products, weights.proj),
            bound_product(products, weights.out),
            Convolution(
                np.ascontiguousarray(weights.conv_weight.float().numpy()[:, 0].T),
                None if weights.conv_bias is None else weights.conv_bias.float().numpy(),
            ),
            weights.a.float().numpy(),
            weights.d.float().numpy()[:, None],
            weights.dt_bias.float().numpy(),
            (np.float32(low), np.float32(high)),
            NormWeight(norm.weight.reshape(weights.shape.groups, -1), norm.eps),
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
        inner = self.shape.inner
        self.proj.write(normed, own.projected)
        projected = own.projected.numpy()
        inputs = runs.gather(projected[runs.tokens, inner:], states[2])
        convolved = self.convolution.apply(runs, inputs[:, : -self.shape.heads], states[0])
        own.y[:] = 0.0
        own.y[runs.tokens] = self._scan(runs, convolved, inputs[:, -self.shape.heads :], states[1])[runs.own]
        silu_mul(projected[:, :inner], own.y, own.gated)
        own.norm.apply(self.gated_norm)
        return own.gated_parts

    def _scan(
        self, runs: RowTokens, convolved: NDArray[np.float32], dt: NDArray[np.float32], state: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Run the recurrence. convolved: [n, channels]. dt: [n, heads], as projected. Returns y, [n, inner]."""
        shape = self.shape
        dt = np.clip(softplus(dt + self.dt_bias), *self.dt_limits)
        decay = np.exp(dt * self.a)
        x = convolved[:, : shape.inner].reshape(-1, shape.heads, shape.head_dim)
        b, c = convolved[:, shape.inner :].reshape(-1, 2, shape.groups, 1, 1, shape.state).swapaxes(0, 1)
        each = shape.heads // shape.groups
        scaled = (x * dt[:, :, None]).reshape(-1, shape.groups, each, shape.head_dim, 1)
        y = np.empty((len(x), shape.groups, each, shape.head_dim), np.float32)
        held = runs.begin(state).reshape(-1, shape.groups, each, shape.head_dim, shape.state)
        decay = decay.reshape(-1, shape.groups, each, 1, 1)
        writes = runs.writes.by_step()
        for step, (rows, indexes) in enumerate(runs.steps()):
            now = held[:rows]
            now *= decay[indexes]
            now += scaled[indexes] * b[indexes]
            y[indexes] = np.einsum("rghps,rghps->rghp", now, np.broadcast_to(c[indexes], now.shape))
            if step in writes:
                left, slots = writes[step]
                state[slots] = held[left].reshape(-1, *state.shape[1:])
        y = y.reshape(x.shape)
        y += self.d * x
        return y.reshape(-1, shape.inner)
