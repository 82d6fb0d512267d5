"""Rotary position embedding, halves rotated against each other."""

from __future__ import annotations

import torch

from runtime.kernels.kernel_set import RopeTable


def rope_factors(table: RopeTable) -> torch.Tensor:
    """What elements of a head are multiplied with, themselves and swapped: float32 [positions, 2, head_dim]."""
    cos, sin = table.cos, table.sin
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)


def rope_at(factors: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors for `rotate`, once a forward.

    positions: int64 [T], clamped to the table. Returns cos and signed sin, float32 [T, 1, head_dim].
    """
    cos, signed_sin = factors.index_select(0, positions.clamp(0, factors.shape[0] - 1)).split(1, dim=1)
    return cos, signed_sin


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, head_dim]. Returns the rotated heads in float32, contiguous.

    Products and sums are separate calls: each is exactly rounded, while a fused multiply-add is used or not depending
    on where an element lies.
    """
    tokens, heads, head_dim = x.shape
    swapped = x.unflatten(-1, (2, head_dim // 2)).flip(2).view(tokens, heads, head_dim)
    return (x * cos).add_(swapped * signed_sin)
