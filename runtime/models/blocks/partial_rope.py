"""Attention of which a part of each head is rotated, its first numbers.

Kernels rotate an element of a head with the one half a head further, and a checkpoint has the two closer together if
only a part is rotated. So the outputs of queries and keys are taken in another order: each half of a head begins with
its half of what is rotated. Scores are sums over a head and do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import AttentionShape, Norm
from runahead.runtime.models.config.rope_values import rope_object
from runahead.runtime.models.config.values import number

_PARTIAL: Final = "partial_rotary_factor"


def share_of(raw: Mapping[str, Any], default: float = 1.0) -> float:
    """Of a head, that is rotated. default: where the file does not say. Raises CheckpointError."""
    _, found = rope_object(raw)
    share = number(found if found.get(_PARTIAL) is not None else raw, _PARTIAL, float, default)
    if share > 1.0:
        raise CheckpointError(f"{_PARTIAL} is {share!r}; it must be at most 1")
    return share


def rotated_of(head_dim: int, share: float) -> int:
    """How many numbers of a head are rotated. Raises CheckpointError."""
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise CheckpointError(f"{_PARTIAL} rotates {rotated} of {head_dim} numbers; it must be an even number")
    return rotated


def head_order(head_dim: int, rotated: int) -> torch.Tensor:
    """Of the numbers of a head: which of the checkpoint's is where. int64 [head_dim]. Both are even."""
    assert 0 <= rotated <= head_dim and rotated % 2 == head_dim % 2 == 0, (rotated, head_dim)
    middle = (rotated + head_dim) // 2
    parts = ((0, rotated // 2), (rotated, middle), (rotated // 2, rotated), (middle, head_dim))
    return torch.cat([torch.arange(*part) for part in parts])


def order_of_qkv(shape: AttentionShape, rotated: int | None) -> torch.Tensor | None:
    """Of the outputs for queries, keys and values; None: as they are. rotated: numbers of a head; None: all."""
    size = shape.head_dim
    if rotated is None or rotated == size:
        return None
    turned = shape.heads + shape.kv_heads
    heads = torch.arange(turned)[:, None] * size + head_order(size, rotated)
    return torch.cat([heads.flatten(), torch.arange(turned * size, (turned + shape.kv_heads) * size)])


def norm_in_order(norm: Norm, rotated: int | None) -> Norm:
    """A norm of heads, for queries and keys in the order of `order_of_qkv`."""
    if rotated is None:
        return norm
    order = head_order(norm.weight.numel(), rotated)
    return Norm(norm.weight[order.to(norm.weight.device)], norm.eps)
