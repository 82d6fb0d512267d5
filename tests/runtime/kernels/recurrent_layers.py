"""Layers with recurrent states on the CPU: random weights, and what they add to rows of a residual."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.layers import DeltaShape, GatedDelta, Linear, Mamba2, Mamba2Shape, Norm
from runahead.runtime.kernels.reference.gated_delta import BoundDelta
from runahead.runtime.kernels.reference.linear import Products, choose_products
from runahead.runtime.kernels.reference.mamba2 import BoundMamba2
from runahead.runtime.kernels.reference.ops import Buffers, NormWeight
from runahead.runtime.kernels.reference.recurrence import RecurrentBuffers, row_tokens_of
from tests.runtime.kernels.recurrent_batches import Row, batch_of

HIDDEN, SLOTS, DRAFTS = 24, 5, 3
LIMITS = (0.02, 1.0)  # of Mamba-2's steps


class RecurrentLayer(ABC):
    """A layer with random weights. Freed slots hold NaN."""

    shape: ClassVar[Any]
    eps: ClassVar[float]
    weights: Any
    bound: Any

    def __init__(self, seed: int) -> None:
        self.products: Products = choose_products()
        draw = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw)

        self.make(numbers)
        kept = self.weights.keeps
        self.states = [np.full((SLOTS, *shape), np.nan, np.float32) for shape in (*kept.state, (DRAFTS, kept.inputs))]

    @abstractmethod
    def make(self, numbers: Any) -> None:
        """Make the weights. numbers: random ones of a shape."""

    @abstractmethod
    def buffers(self, tokens: int) -> Any:
        """Make the layer's buffers for this many tokens."""

    def added(self, residual: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float32]:
        """residual: [n, HIDDEN]. Everything that nobody may read is NaN beforehand."""
        count = len(residual)
        tokens = count + -count % self.products.row_multiple
        buffers = Buffers.make(tokens, HIDDEN, self.products)
        own = self.buffers(tokens)
        own.y[:], own.gated[:] = np.nan, np.nan
        own.projected.fill_(float("nan"))
        buffers.residual_array[:count] = residual
        with np.errstate(all="ignore"):  # as a forward computes
            buffers.norm.apply(NormWeight.of(self.weights.norm))
            parts = self.bound.mix(buffers.normed_parts, own, row_tokens_of(batch_of(rows)), self.states)
        buffers.residual_array[:] = 0.0
        self.bound.out.add(parts, buffers.residual)
        return buffers.residual_array[:count].copy()


class DeltaLayer(RecurrentLayer):
    """A gated delta net."""

    shape = DeltaShape(key_heads=2, key_dim=12, value_heads=6, value_dim=8, window=4)
    eps = 1e-2

    def __init__(self) -> None:
        super().__init__(seed=4)

    def make(self, numbers: Any) -> None:
        self.proj = numbers(self.shape.inner + self.shape.channels + 2 * self.shape.value_heads, HIDDEN)
        self.out = numbers(HIDDEN, self.shape.inner)
        self.weights = GatedDelta(
            self.shape,
            norm=Norm(torch.ones(HIDDEN), self.eps),
            proj=Linear(self.products.pack(self.proj), None),
            conv_weight=numbers(self.shape.channels, 1, self.shape.window),
            a=-numbers(self.shape.value_heads).exp(),
            dt_bias=numbers(self.shape.value_heads),
            gated_norm=Norm(1.0 + 0.1 * numbers(self.shape.value_dim), self.eps),
            out=Linear(self.products.pack(self.out), None),
        )
        self.bound = BoundDelta.of(self.weights, self.products)

    def buffers(self, tokens: int) -> RecurrentBuffers:
        return RecurrentBuffers.make(tokens, self.weights, self.products)


class Mamba2Layer(RecurrentLayer):
    """Mamba-2."""

    shape = Mamba2Shape(heads=6, head_dim=8, groups=2, state=16, window=4)
    eps = 1e-5

    def __init__(self) -> None:
        super().__init__(seed=3)

    def make(self, numbers: Any) -> None:
        self.proj, self.out = (
            numbers(self.shape.inner + self.shape.channels + self.shape.heads, HIDDEN),
            numbers(HIDDEN, self.shape.inner),
        )
        self.weights = Mamba2(
            self.shape,
            norm=Norm(torch.ones(HIDDEN), self.eps),
            proj=Linear(self.products.pack(self.proj), None),
            conv_weight=numbers(self.shape.channels, 1, self.shape.window),
            conv_bias=numbers(self.shape.channels),
            a=-numbers(self.shape.heads).exp(),
            d=numbers(self.shape.heads),
            dt_bias=numbers(self.shape.heads),
            dt_limits=LIMITS,
            gated_norm=Norm(1.0 + 0.1 * numbers(self.shape.inner), self.eps),
            out=Linear(self.products.pack(self.out), None),
        )
        self.bound = BoundMamba2.of(self.weights, self.products)

    def buffers(self, tokens: int) -> RecurrentBuffers:
        return RecurrentBuffers.make(tokens, self.weights, self.products)


def residual_of(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)
