"""Rows of a matrix put into places of another one."""

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


def put_rows(rows: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """out[places[i]] = rows[i], in the dtype of `out`. rows: contiguous [n, width]. out: contiguous [m, width]. places:
    int32 [n]; of several rows with one place, any part of any of them is there afterwards."""
    count, width = rows.shape
    _put_rows_kernel[(count, triton.cdiv(width, _BLOCK))](rows, places, out, WIDTH=width, BLOCK=_BLOCK, num_warps=4)
