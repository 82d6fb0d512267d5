"""Scatters rows or columns of a matrix into another."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 2048


@triton.jit
def _put_kernel(
    x, targets, out, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy BLOCK numbers of a row to another row, or with COLUMNS each number to another column of its row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(x + row * WIDTH + i, mask=i < WIDTH)
    if COLUMNS:
        to = row * OUT_WIDTH + tl.load(targets + i, mask=i < WIDTH, other=0)
    else:
        to = tl.load(targets + row).to(tl.int64) * OUT_WIDTH + i
    tl.store(out + to, found.to(out.dtype.element_ty), mask=i < WIDTH)


def put_columns(x: torch.Tensor, out: torch.Tensor, targets: torch.Tensor) -> None:
    """Set out[:, targets[i]] = x[:, i] in the dtype of `out`; other columns stay. x: contiguous [n, width]. out:
    contiguous [n or more, m]. targets: int32 [width], distinct.
    """
    _put(x, out, targets, columns=True)


def put_rows(rows: torch.Tensor, out: torch.Tensor, targets: torch.Tensor) -> None:
    """Set out[targets[i]] = rows[i] in the dtype of `out`. rows: contiguous [n, width]. out: contiguous [m, width].
    targets: int32 [n]; with duplicates the result may mix their rows.
    """
    _put(rows, out, targets, columns=False)


def _put(x: torch.Tensor, out: torch.Tensor, to: torch.Tensor, *, columns: bool) -> None:
    count, width = x.shape
    _put_kernel[(count, triton.cdiv(width, _BLOCK))](
        x, to, out, WIDTH=width, OUT_WIDTH=out.shape[1], COLUMNS=columns, BLOCK=_BLOCK, num_warps=4
    )
