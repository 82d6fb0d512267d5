"""Rows of a batch in FP8, as products with FP8 matrices read them.

128 neighboring values of a row share a float32 scale: the least power of two that is not below their greatest magnitude
over 448, the greatest number of e4m3. So multiplying by it rounds nothing. A row's numbers and scales depend on the row
alone. A value that is not finite makes the row's products not finite.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS
from runahead.runtime.rounding import ceil_div

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


def empty_rows(num_rows: int, depth: int, device: torch.device) -> Fp8Rows:
    """Allocate `num_rows` rows of `depth` values, a multiple of 128."""
    padded = ceil_div(num_rows, ROWS_MULTIPLE) * ROWS_MULTIPLE
    numbers = torch.empty((padded, depth), dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(numbers, torch.empty((depth // FP8_COLUMNS, padded), dtype=torch.float32, device=device))
