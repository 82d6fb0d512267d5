"""A rank's part of a recurrent mixer: some of its heads, with their groups, as a mixer by itself.

A head's state hangs on that head's numbers and its group's alone. So the part is a mixer of fewer heads, which every
kernel computes as any other: its state slot has those heads, and what its last product gives is a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from runahead.runtime.kernels.layers import DeltaShape, Mamba2Shape
from runahead.runtime.kernels.share import Share

ShapeT = TypeVar("ShapeT", Mamba2Shape, DeltaShape)


@dataclass(frozen=True, slots=True)
class RecurrentPart(Generic[ShapeT]):
    """What a part of a mixer consists of. All are int64, ascending; None: the part is the whole."""

    shape: ShapeT  # of the part by itself
    outputs: torch.Tensor | None = None  # of the first product
    channels: torch.Tensor | None = None  # of the convolution
    inner: torch.Tensor | None = None  # of what the last product reads
    heads: torch.Tensor | None = None  # whose states are kept


def part_of_mamba2(shape: Mamba2Shape, share: Share) -> RecurrentPart[Mamba2Shape]:
    """Raises ShareError where heads or groups can't be shared: a group's norm is over all of its heads."""
    if share.is_whole:
        return RecurrentPart(shape)
    groups, heads = share.part_of(shape.groups, "groups of B and C"), share.part_of(shape.heads, "heads")
    part = replace(shape, heads=len(heads), groups=len(groups))
    x, one_each = _numbers(heads, shape.head_dim), _numbers(heads, 1)
    channels = [(shape.inner, x), *[(shape.groups * shape.state, _numbers(groups, shape.state))] * 2]
    outputs = [(shape.inner, x), *channels, (shape.heads, one_each)]
    return RecurrentPart(part, _joined(outputs), _joined(channels), x, one_each)


def part_of_delta(shape: DeltaShape, share: Share) -> RecurrentPart[DeltaShape]:
    """Raises ShareError where heads of keys can't be shared: those of values go with them."""
    if share.is_whole:
        return RecurrentPart(shape)
    keys, values = share.part_of(shape.key_heads, "heads of keys"), share.part_of(shape.value_heads, "heads of values")
    part = replace(shape, key_heads=len(keys), value_heads=len(values))
    v, one_each = _numbers(values, shape.value_dim), _numbers(values, 1)
    channels = [*[(shape.keys, _numbers(keys, shape.key_dim))] * 2, (shape.inner, v)]
    outputs = [(shape.inner, v), *channels, *[(shape.value_heads, one_each)] * 2]
    return RecurrentPart(part, _joined(outputs), _joined(channels), v, one_each)


def _numbers(of: range, size: int) -> torch.Tensor:
    """The places of these, of which each has `size` numbers."""
    return torch.arange(of.start * size, of.stop * size)


def _joined(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Of pieces that lie one behind the other, each with how long it is, the places that are meant in each."""
    begins = torch.tensor([0, *(length for length, _ in pieces)]).cumsum(0).tolist()
    return torch.cat([begin + places for begin, (_, places) in zip(begins, pieces, strict=False)])
