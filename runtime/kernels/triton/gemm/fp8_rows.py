"""Rows of a batch in FP8, as products with FP8 matrices read them.

128 neighboring values of a row share a float32 scale: the least power of two that is not below their greatest magnitude
over 448, the greatest number of e4m3. So multiplying by it rounds nothing. A row's numbers and scales depend on the row
alone. A value that is not finite makes the row's products not finite.
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

_BLOCKS_AT_ONCE: Final = 16
ROWS_MULTIPLE: Final = 16  # of rows, which the vendor's library takes
_COLUMNS = tl.constexpr(FP8_COLUMNS)
_LEAST_SCALE = tl.constexpr(2.0**-60)  # also of zeros


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows [R, in], of which the first ones are the batch's and the rest are undefined; R is a multiple of 16.

    numbers: e4m3 [R, in]. scales: float32 [in / 128, R], powers of two, by which 128 numbers of a row are multiplied.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return self.numbers.shape[0]


@triton.jit
def to_fp8(values):
    """Quantize blocks of a row. values: float32 [B, 128]. Returns e4m3 numbers, [B, 128], and their scales, [B]."""
    least = tl.maximum(tl.max(tl.abs(values), 1) * (1.0 / 448.0), _LEAST_SCALE)
    exponent = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000  # of the power of two that is not below
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return (values * inverse[:, None]).to(tl.float8e4nv), exponent.to(tl.float32, bitcast=True)


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
    quantized, scale = to_fp8(values)
    tl.store(numbers + at, quantized, mask=inside[:, None])
    tl.store(scales + block * padded_rows + row, scale, mask=inside)


def empty_rows(num_rows: int, depth: int, device: torch.device) -> Fp8Rows:
    """For `num_rows` rows of `depth` values, a multiple of 128."""
    padded = ceil_div(num_rows, ROWS_MULTIPLE) * ROWS_MULTIPLE
    numbers = torch.empty((padded, depth), dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(numbers, torch.empty((depth // FP8_COLUMNS, padded), dtype=torch.float32, device=device))


def fp8_rows(x: torch.Tensor, num_rows: int, dependent: bool = False) -> Fp8Rows:
    """The first rows of x in FP8. x: bfloat16 [num_rows or more, in], contiguous, `in` a multiple of 128."""
    depth = x.shape[1]
    blocks = depth // FP8_COLUMNS
    rows = empty_rows(num_rows, depth, x.device)
    options: dict[str, Any] = {"launch_pdl": True} if dependent and dependent_launch_works() else {}
    at_once = min(triton.next_power_of_2(blocks), _BLOCKS_AT_ONCE)
    _quantize_kernel[(num_rows, ceil_div(blocks, at_once))](
        x, rows.numbers, rows.scales, len(rows), DEPTH=depth, BLOCKS=at_once, DEPENDENT=bool(options), num_warps=4,
        **options,
    )  # fmt: skip
    return rows
