"""RMS norm and the gated activation, row by row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# torch gives elementwise work below this many elements to one thread. Above it the elements are cut in ranges whose
# borders depend on the number of threads and rows, and an element at a border takes the scalar exp instead of the
# vector one: other bits.
_SERIAL_ELEMENTS = 32768


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., n]. weight: [n]. Returns x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    Only the mean is a sum, over one row; what follows is exactly rounded, element by element.
    """
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale.mul_(scale).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return wide.mul(scale).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual); x is overwritten by the sum."""
    total = x.add_(residual)
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 * n], gate first. Returns silu(gate) * up, [rows, n].

    Rows are taken in blocks that one thread computes, so that an element's path depends on its column alone.
    """
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    block = max(1, (_SERIAL_ELEMENTS - 1) // n)
    gate, up = gate_up.split(n, dim=1)
    if rows <= block:
        return F.silu(gate).mul_(up)
    out = torch.empty((rows, n), dtype=gate_up.dtype, device=gate_up.device)
    for start in range(0, rows, block):
        torch.ops.aten.silu.out(gate[start : start + block], out=out[start : start + block])
    return out.mul_(up)
