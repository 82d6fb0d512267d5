"""Partial rotary embedding: only the first numbers of each head are rotated.

Kernels pair an element with the one half a head further, but a checkpoint pairs elements within the rotated part. So
outputs of queries and keys are reordered: each half of a head begins with its half of the rotated part. Scores are sums
over a head and do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import AttentionShape, Norm
from runahead.runtime.models.architecture import in_order
from runahead.runtime.models.config.rope_values import rope_object
from runahead.runtime.models.config.values import number

_PARTIAL: Final = "partial_rotary_factor"


def rotary_fraction_of(raw: Mapping[str, Any], default: float = 1.0) -> float:
    """Return the rotated part of a head. default: if the file lacks it. Raises CheckpointError."""
    _, found = rope_object(raw)
    fraction = number(found if found.get(_PARTIAL) is not None else raw, _PARTIAL, float, default)
    if fraction > 1.0:
        raise CheckpointError(f"{_PARTIAL} is {fraction!r}; it must be at most 1")
    return fraction


def rotated_of(head_dim: int, fraction: float) -> int:
    """Return the number of rotated elements of a head. Raises CheckpointError."""
    rotated = int(head_dim * fraction)
    if rotated < 2 or rotated % 2:
        raise CheckpointError(f"{_PARTIAL} rotates {rotated} of {head_dim} numbers; it must be an even number")
    return rotated


def head_order(head_dim: int, rotated: int) -> torch.Tensor:
    """Return the checkpoint's index of each element of a head, int64 [head_dim]. Both arguments are even."""
    assert 0 <= rotated <= head_dim and rotated % 2 == head_dim % 2 == 0, (rotated, head_dim)
    middle = (rotated + head_dim) // 2
    parts = ((0, rotated // 2), (rotated, middle), (rotated // 2, rotated), (middle, head_dim))
    return torch.cat([torch.arange(*part) for part in parts])


def order_of_qkv(shape: AttentionShape, rotated: int | None) -> torch.Tensor | None:
    """Return the order of the outputs of queries, keys and values; None: unchanged. rotated: elements of a head; None:
    all.
    """
    size = shape.head_dim
    if rotated is None or rotated == size:
        return None
    turned = shape.heads + shape.kv_heads
    heads = torch.arange(turned)[:, None] * size + head_order(size, rotated)
    return torch.cat([heads.flatten(), torch.arange(turned * size, (turned + shape.kv_heads) * size)])


def norm_in_order(norm: Norm, rotated: int | None) -> Norm:
    """Return a norm of heads in the order of `order_of_qkv`."""
    if rotated is None:
        return norm
    return Norm(in_order(norm.weight, head_order(norm.weight.numel(), rotated)), norm.eps)
