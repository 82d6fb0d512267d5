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
def _put_rows_kernel(rows, places, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(rows + row * WIDTH + i, mask=i < WIDTH)
    tl.store(out + place * WIDTH + i, found.to(out.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _put_columns_kernel(x, places, out, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + i, mask=i < WIDTH, other=0)
    found = tl.load(x + row * WIDTH + i, mask=i < WIDTH)
    tl.store(out + row * OUT_WIDTH + place, found.to(out.dtype.element_ty), mask=i < WIDTH)


def put_columns(x: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """Set out[:, places[i]] = x[:, i] in the dtype of `out`; other columns stay. x: contiguous [n, width]. out:
    contiguous [n or more, m]. places: int32 [width], distinct.
    """
    count, width = x.shape
    grid = (count, triton.cdiv(width, _BLOCK))
    _put_columns_kernel[grid](x, places, out, WIDTH=width, OUT_WIDTH=out.shape[1], BLOCK=_BLOCK, num_warps=4)


def put_rows(rows: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """Set out[places[i]] = rows[i] in the dtype of `out`. rows: contiguous [n, width]. out: contiguous [m, width].
    places: int32 [n]; with duplicates the result may mix their rows.
    """
    count, width = rows.shape
    _put_rows_kernel[(count, triton.cdiv(width, _BLOCK))](rows, places, out, WIDTH=width, BLOCK=_BLOCK, num_warps=4)
