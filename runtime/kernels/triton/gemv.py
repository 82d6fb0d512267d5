"""The product of one row with a matrix. Reading the weights takes all of its time, so they are all asked for at once.

With one row the vendor's product leaves half of the memory's bandwidth unused at the sizes of small models.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_MAX_BLOCK: Final = 1024
_MANY_OUTPUTS: Final = 8192  # from here on a program takes more of them, and the grid is still many times the chip


@triton.jit
def _gemv_kernel(
    x, weight, bias, out, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs; sums in float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    base = weight + row.to(tl.int64)[:, None] * DEPTH + i[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.static_range(0, DEPTH, BLOCK):
        if DEPTH % BLOCK == 0 and OUTPUTS % ROWS == 0:
            w = tl.load(base + first)
            v = tl.load(x + first + i)
        else:
            inside = first + i < DEPTH
            w = tl.load(base + first, mask=(row < OUTPUTS)[:, None] & inside[None, :], other=0.0)
            v = tl.load(x + first + i, mask=inside, other=0.0)
        acc += w.to(tl.float32) * v.to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < OUTPUTS, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: contiguous [1, in]. weight: contiguous [out, in]. bias: [out]. Returns x @ weight.T + bias, [1, out]."""
    outputs, depth = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    rows = 8 if outputs >= _MANY_OUTPUTS else 4 if outputs >= 1024 else 2
    block = min(triton.next_power_of_2(depth), _MAX_BLOCK)
    _gemv_kernel[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        OUTPUTS=outputs,
        DEPTH=depth,
        ROWS=rows,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        num_warps=4 if rows * block >= 2048 else 2,
    )
    return out
