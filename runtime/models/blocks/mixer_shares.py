"""A rank's part of a mixer: some of its heads, with their KV heads or groups, as a mixer by itself. Its part of a
feed-forward: some of the intermediate numbers.

A head's attention or state depends on the numbers of that head and its group alone. So the part is a mixer of fewer
heads, which every kernel computes as any other: its KV blocks or its state slot have those heads, and its last product
gives a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from runahead.runtime.kernels.layers import AttentionShape, DeltaShape, Mamba2Shape
from runahead.runtime.kernels.share import Share, ShareError

ShapeT = TypeVar("ShapeT", Mamba2Shape, DeltaShape)


@dataclass(frozen=True, slots=True)
class RecurrentPart(Generic[ShapeT]):
    """What a part of a mixer consists of. Tensors are int64, ascending; None: the part is the whole."""

    shape: ShapeT  # of the part by itself
    outputs: torch.Tensor | None = None  # of the first product
    channels: torch.Tensor | None = None  # of the convolution
    inner: range | None = None  # of what the last product reads
    heads: torch.Tensor | None = None  # whose states are kept


def places_of(things: range, size: int = 1) -> torch.Tensor:
    """The places of these, of which each has `size` numbers. int64"""
    return torch.arange(things.start * size, things.stop * size)


def part_of_width(
    width: int, share: Share, *, pieces: int = 2, what: str = "intermediate numbers"
) -> tuple[torch.Tensor | None, range | None]:
    """Which outputs of a feed-forward's first product the rank has, int64, and which inputs of its last one; None: all.
    pieces: of the first product, each of `width` outputs: gate and up, or 1. what: names the numbers in the error.
    Raises ShareError."""
    if share.is_whole:
        return None, None
    inputs = share.part_of(width, what)
    return torch.cat([piece * width + places_of(inputs) for piece in range(pieces)]), inputs


def part_of_heads(shape: AttentionShape, share: Share) -> tuple[AttentionShape, torch.Tensor | None, range | None]:
    """The rank's heads of an attention as an attention by itself; which outputs of queries, keys and values they are,
    int64, and which inputs of the last product; None: the part is the whole. Raises ShareError."""
    if share.is_whole:
        return shape, None, None
    heads, kv_heads, size = share.part_of(shape.heads, "query heads"), share.kv_heads_of(shape.kv_heads), shape.head_dim
    keys = shape.q_size + places_of(kv_heads, size)
    own = torch.cat([places_of(heads, size), keys, shape.kv_size + keys])
    part = replace(shape, heads=len(heads), kv_heads=len(kv_heads))
    return part, own, range(heads.start * size, heads.stop * size)


def part_of_mamba2(shape: Mamba2Shape, share: Share) -> RecurrentPart[Mamba2Shape]:
    """Raises ShareError where a rank would have a part of a group."""
    if share.is_whole:
        return RecurrentPart(shape)
    if shape.groups % share.of:
        raise ShareError(
            f"{share.of} ranks can't have equal parts of {shape.groups} groups of Mamba-2 heads; the number of ranks "
            f"must divide {shape.groups}, since the norm of a group is taken over all of its heads"
        )
    groups, heads = share.part_of(shape.groups, "groups of Mamba-2 heads"), share.part_of(shape.heads, "heads")
    part = replace(shape, heads=len(heads), groups=len(groups))
    x, one_each = places_of(heads, shape.head_dim), places_of(heads, 1)
    channels = [(shape.inner, x), *[(shape.groups * shape.state, places_of(groups, shape.state))] * 2]
    outputs = [(shape.inner, x), *channels, (shape.heads, one_each)]
    inner = range(heads.start * shape.head_dim, heads.stop * shape.head_dim)
    return RecurrentPart(part, _joined(outputs), _joined(channels), inner, one_each)


def part_of_delta(shape: DeltaShape, share: Share) -> RecurrentPart[DeltaShape]:
    """Raises ShareError where heads of keys can't be shared: those of values go with them."""
    if share.is_whole:
        return RecurrentPart(shape)
    keys, values = share.part_of(shape.key_heads, "heads of keys"), share.part_of(shape.value_heads, "heads of values")
    part = replace(shape, key_heads=len(keys), value_heads=len(values))
    v, one_each = places_of(values, shape.value_dim), places_of(values, 1)
    channels = [*[(shape.keys, places_of(keys, shape.key_dim))] * 2, (shape.inner, v)]
    outputs = [(shape.inner, v), *channels, *[(shape.value_heads, one_each)] * 2]
    inner = range(values.start * shape.value_dim, values.stop * shape.value_dim)
    return RecurrentPart(part, _joined(outputs), _joined(channels), inner, one_each)


def _joined(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Of pieces that lie one behind the other, each with how long it is, the places that are meant in each."""
    begins = torch.tensor([0, *(length for length, _ in pieces)]).cumsum(0).tolist()
    return torch.cat([begin + places for begin, (_, places) in zip(begins, pieces, strict=False)])
