"""Recurrent mixers with random weights, and what the reference makes of what their first product gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from runahead.runtime.kernels.layers import DeltaShape, GatedDelta, Linear, Mamba2, Mamba2Shape, Norm
from runahead.runtime.kernels.reference.gated_delta import BoundDelta
from runahead.runtime.kernels.reference.linear import choose_products
from runahead.runtime.kernels.reference.mamba2 import BoundMamba2
from runahead.runtime.kernels.reference.recurrence import RecurrentBuffers, row_tokens_of
from tests.runtime.kernels.recurrent_batches import Row, batch_of

HIDDEN, SLOTS = 8, 6
Mixer = Mamba2 | GatedDelta

MAMBA2 = (  # odd heads and one group; groups, and sizes that are no powers of two; a single number of everything
    Mamba2Shape(heads=3, head_dim=16, groups=1, state=32, window=4),
    Mamba2Shape(heads=6, head_dim=24, groups=2, state=20, window=3),
    Mamba2Shape(heads=2, head_dim=80, groups=1, state=128, window=2),
)
DELTA = (  # odd heads; several heads of values to a key, and sizes that are no powers of two
    DeltaShape(key_heads=3, key_dim=32, value_heads=3, value_dim=16, window=4),
    DeltaShape(key_heads=1, key_dim=24, value_heads=3, value_dim=20, window=3),
    DeltaShape(key_heads=2, key_dim=128, value_heads=4, value_dim=48, window=4),
)


def mamba2(
    shape: Mamba2Shape, dtype: torch.dtype, *, bias: bool = True, limits: tuple[float, float] | None = None
) -> Mamba2:
    draw = torch.Generator().manual_seed(3)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=draw).to(dtype)

    return Mamba2(
        shape,
        norm=Norm(torch.ones(HIDDEN), 1e-5),
        proj=Linear(numbers(width_of(shape), HIDDEN), None),
        conv_weight=numbers(shape.channels, 1, shape.window) / shape.window**0.5,
        conv_bias=numbers(shape.channels) if bias else None,
        a=-numbers(shape.heads).float().exp(),
        d=numbers(shape.heads),
        dt_bias=numbers(shape.heads) - 1.0,
        dt_limits=(0.0, float("inf")) if limits is None else limits,
        gated_norm=Norm((1.0 + 0.1 * numbers(shape.inner)).to(dtype), 1e-5),
        out=Linear(numbers(HIDDEN, shape.inner), None),
    )  # fmt: skip


def gated_delta(shape: DeltaShape, dtype: torch.dtype) -> GatedDelta:
    draw = torch.Generator().manual_seed(4)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=draw).to(dtype)

    return GatedDelta(
        shape,
        norm=Norm(torch.ones(HIDDEN), 1e-5),
        proj=Linear(numbers(width_of(shape), HIDDEN), None),
        conv_weight=numbers(shape.channels, 1, shape.window) / shape.window**0.5,
        a=-numbers(shape.value_heads).float().exp(),
        dt_bias=numbers(shape.value_heads) - 1.0,
        gated_norm=Norm((1.0 + 0.1 * numbers(shape.value_dim)).to(dtype), 1e-2),
        out=Linear(numbers(HIDDEN, shape.inner), None),
    )


def mixer_of(shape: Mamba2Shape | DeltaShape, dtype: torch.dtype = torch.float32) -> Mixer:
    return mamba2(shape, dtype) if isinstance(shape, Mamba2Shape) else gated_delta(shape, dtype)


def width_of(shape: Mamba2Shape | DeltaShape) -> int:
    """Numbers of a token that the first product gives."""
    if isinstance(shape, Mamba2Shape):
        return shape.inner + shape.channels + shape.heads
    return shape.inner + shape.channels + 2 * shape.value_heads


def drawn(
    tokens: int, shape: Mamba2Shape | DeltaShape, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """What the first product gives of so many tokens."""
    draw = torch.Generator().manual_seed(100 + seed)
    return torch.randn(tokens, width_of(shape), generator=draw).to(dtype)


def held_states(mixer: Mixer, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """States of rows that have seen something, in every slot."""
    draw = torch.Generator().manual_seed(200 + seed)
    return tuple(torch.randn(SLOTS, *shape, generator=draw) for shape in mixer.keeps.state)


def with_runs(mixer: Mixer, states: tuple[torch.Tensor, ...], drafts: int) -> tuple[torch.Tensor, ...]:
    """The same states, and behind them room for the inputs of so many drafts of a row, which holds NaN."""
    return *states, torch.full((SLOTS, drafts, mixer.keeps.inputs), torch.nan)


@dataclass(frozen=True, slots=True)
class _Given:
    """In the place of the first product: what it gives."""

    projected: torch.Tensor

    def write(self, x: Any, out: torch.Tensor) -> None:
        out.zero_()
        out[: len(self.projected)] = self.projected.float()


def by_the_reference(
    mixer: Mixer, projected: torch.Tensor, states: tuple[torch.Tensor, ...], rows: Sequence[Row]
) -> torch.Tensor:
    """What `mixer.out` reads, float32 [T, inner]. states: changed in place; the inputs of drafts behind them, if rows
    have any."""
    products = choose_products()
    held = [tensor.numpy() for tensor in states]
    if len(held) == len(mixer.keeps.state):
        held.append(np.zeros((len(held[0]), 0, 0), np.float32))
    given: Any = _Given(projected)
    bound: Any = BoundMamba2.of(mixer, products) if isinstance(mixer, Mamba2) else BoundDelta.of(mixer, products)
    own = RecurrentBuffers.make(len(projected), mixer, products)
    with np.errstate(all="ignore"):  # as a forward computes
        replace(bound, proj=given).mix((), own, row_tokens_of(batch_of(rows)), held)
    return torch.from_numpy(own.gated.copy())
