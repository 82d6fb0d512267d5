"""A rank's part of a mixer, as a mixer of some heads with their KV heads or groups; and of a feed-forward, as some of
its intermediate numbers.

A head's attention or state depends only on its head and group. So the part is a smaller mixer for every kernel: its KV
blocks or state slot have those heads, and its last product gives a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from runahead.runtime.kernels.layers import AttentionShape, DeltaShape, Mamba2Shape
from runahead.runtime.kernels.ranks import Shard, ShardError

ShapeT = TypeVar("ShapeT", Mamba2Shape, DeltaShape)


@dataclass(frozen=True, slots=True)
class RecurrentPart(Generic[ShapeT]):
    """The tensors of a mixer's part, int64, ascending; None: all."""

    shape: ShapeT  # of the part
    outputs: torch.Tensor | None = None  # of the first product
    channels: torch.Tensor | None = None  # of the convolution
    inner: range | None = None  # inputs of the last product
    heads: torch.Tensor | None = None  # whose states are kept


def indexes_of(things: range, size: int = 1) -> torch.Tensor:
    """Return the indexes of these groups' numbers, `size` in each group. int64"""
    return torch.arange(things.start * size, things.stop * size)


def part_of_width(
    width: int, shard: Shard, *, pieces: int = 2, what: str = "intermediate numbers"
) -> tuple[torch.Tensor | None, range | None]:
    """Return the rank's outputs of a feed-forward's first product, int64, and inputs of its last one; None: all.
    pieces: of the first product, `width` outputs each: 2 for gate and up, or 1. what: the numbers' name in errors.
    Raises ShardError.
    """
    if shard.is_whole:
        return None, None
    inputs = shard.part_of(width, what)
    return torch.cat([piece * width + indexes_of(inputs) for piece in range(pieces)]), inputs


def part_of_heads(shape: AttentionShape, shard: Shard) -> tuple[AttentionShape, torch.Tensor | None, range | None]:
    """Return the rank's heads as an attention, its outputs of queries, keys and values, int64, and its inputs of the
    last product; None: all. Raises ShardError.
    """
    if shard.is_whole:
        return shape, None, None
    heads, kv_heads, size = shard.part_of(shape.heads, "query heads"), shard.kv_heads_of(shape.kv_heads), shape.head_dim
    keys = shape.q_size + indexes_of(kv_heads, size)
    own = torch.cat([indexes_of(heads, size), keys, shape.kv_size + keys])
    part = replace(shape, heads=len(heads), kv_heads=len(kv_heads))
    return part, own, range(heads.start * size, heads.stop * size)


def part_of_mamba2(shape: Mamba2Shape, shard: Shard) -> RecurrentPart[Mamba2Shape]:
    """Return the rank's part of a Mamba-2 mixer. Raises ShardError if the ranks can't have whole groups."""
    if shard.is_whole:
        return RecurrentPart(shape)
    if shape.groups % shard.of:
        raise ShardError(
            f"{shard.of} ranks can't have equal parts of {shape.groups} groups of Mamba-2 heads; the number of ranks "
            f"must divide {shape.groups}, since the norm of a group is taken over all of its heads"
        )
    groups, heads = shard.part_of(shape.groups, "groups of Mamba-2 heads"), shard.part_of(shape.heads, "heads")
    part = replace(shape, heads=len(heads), groups=len(groups))
    x, one_each = indexes_of(heads, shape.head_dim), indexes_of(heads, 1)
    channels = [(shape.inner, x), *[(shape.groups * shape.state, indexes_of(groups, shape.state))] * 2]
    outputs = [(shape.inner, x), *channels, (shape.heads, one_each)]
    inner = range(heads.start * shape.head_dim, heads.stop * shape.head_dim)
    return RecurrentPart(part, _joined(outputs), _joined(channels), inner, one_each)


def part_of_delta(shape: DeltaShape, shard: Shard) -> RecurrentPart[DeltaShape]:
    """Return the rank's part of a gated delta net. Raises ShardError if key heads can't be divided; value heads go with
    them.
    """
    if shard.is_whole:
        return RecurrentPart(shape)
    keys, values = shard.part_of(shape.key_heads, "heads of keys"), shard.part_of(shape.value_heads, "heads of values")
    part = replace(shape, key_heads=len(keys), value_heads=len(values))
    v, one_each = indexes_of(values, shape.value_dim), indexes_of(values, 1)
    channels = [*[(shape.keys, indexes_of(keys, shape.key_dim))] * 2, (shape.inner, v)]
    outputs = [(shape.inner, v), *channels, *[(shape.value_heads, one_each)] * 2]
    inner = range(values.start * shape.value_dim, values.stop * shape.value_dim)
    return RecurrentPart(part, _joined(outputs), _joined(channels), inner, one_each)


def _joined(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Join indexes within consecutive pieces, given each piece's length and indexes."""
    begins = torch.tensor([0, *(length for length, _ in pieces)]).cumsum(0).tolist()
    return torch.cat([begin + indexes for begin, (_, indexes) in zip(begins, pieces, strict=False)])
