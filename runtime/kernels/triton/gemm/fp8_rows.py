"""Rows of a batch in FP8, as products with FP8 matrices read them.

128 neighboring values of a row share a float32 scale: their greatest magnitude over 448, the greatest number of e4m3.
A row's numbers and scales depend on the row alone. A value that is not finite makes the row's products not finite.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS
from runahead.runtime.kernels.triton.gpu.pdl import (
    dependent_launch_works,
    let_dependents_start,
    wait_for_predecessors,
)
from runahead.runtime.rounding import ceil_div

_BLOCKS_AT_ONCE: Final = 8
ROWS_MULTIPLE: Final = 16  # of rows, which the vendor's library takes
_COLUMNS = tl.constexpr(FP8_COLUMNS)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows [R, in], of which the first ones are the batch's and the rest are undefined; R is a multiple of 16.

    numbers: e4m3 [R, in]. scales: float32 [in / 128, R], by which 128 numbers of a row are multiplied.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return self.numbers.shape[0]


@triton.jit
def _quantize_kernel(
    x, numbers, scales, padded_rows, DEPTH: tl.constexpr, BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program for BLOCKS times 128 values of a row."""
    let_dependents_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = row * DEPTH + block[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    inside = block < DEPTH // _COLUMNS
    wait_for_predecessors(DEPENDENT)
    values = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    greatest = tl.maximum(tl.max(tl.abs(values), 1), 1e-30)  # of zeros no number is made of 0 / 0
    quantized = (values * (448.0 / greatest)[:, None]).to(tl.float8e4nv)
    tl.store(numbers + at, quantized, mask=inside[:, None])
    tl.store(scales + block * padded_rows + row, greatest * (1.0 / 448.0), mask=inside)


def fp8_rows(x: torch.Tensor, num_rows: int, dependent: bool = False) -> Fp8Rows:
    """The first rows of x in FP8. x: bfloat16 [num_rows or more, in], contiguous, `in` a multiple of 128."""
    depth = x.shape[1]
    blocks = depth // FP8_COLUMNS
    padded = ceil_div(num_rows, ROWS_MULTIPLE) * ROWS_MULTIPLE
    numbers = torch.empty((padded, depth), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((blocks, padded), dtype=torch.float32, device=x.device)
    options: dict[str, Any] = {"launch_pdl": True} if dependent and dependent_launch_works() else {}
    at_once = min(triton.next_power_of_2(blocks), _BLOCKS_AT_ONCE)
    _quantize_kernel[(num_rows, ceil_div(blocks, at_once))](
        x, numbers, scales, padded, DEPTH=depth, BLOCKS=at_once, DEPENDENT=bool(options), num_warps=4, **options
    )
    return Fp8Rows(numbers, scales)
