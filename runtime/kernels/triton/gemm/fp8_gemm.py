"""Products of rows with an FP8 matrix, both sides in FP8: by the vendor's library, or by kernels of ours.

The matrix units sum 128 columns. One float32 accumulator for each output adds these sums, columns ascending: each is
multiplied by the product of the row's scale and the scale of the weights' block, and added, by one rounding (`fma`).
The library has kernels with a scale for each output and 128 columns, which round the sum times the row's scale first,
and kernels with a scale for 128 x 128 weights, which round the product of both scales. A row's scale is a power of two
(`fp8_rows.py`), so neither rounds anything. Its kernels are compared with ours while the service warms up.

So the bits of a row do not depend on the number of rows, or on which kernel computes it.

Source of the scheme: DeepSeek-V3 Technical Report, section 3.3.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Linear
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, Fp8Weight
from runahead.runtime.kernels.triton.gemm.cublaslt import vendor_library
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gemm.separate_epilogue import fp8_rows
from runahead.runtime.kernels.triton.gpu.capability import current_gpu
from runahead.runtime.rounding import ceil_div

_COLUMNS = tl.constexpr(FP8_COLUMNS)
_TILE: Final = 64  # outputs of a program, as the matrix units take them
_STAGES: Final = 4  # blocks of 128 columns on their way at a time: they fit into the shared memory of any GPU
_LEAST_ROWS, _MOST_ROWS = 16, 64  # rows of the batch that a program has
_GROUPS_CAPABILITY: Final = (9, 0)  # of `fp8_hopper.py`
_GROUPS_ROWS, _GROUPS_FEW_ROWS = 64, 16  # rows of the batch up to which it is the fastest, and of a deep matrix


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_product_kernel(
    x, x_scales, numbers, blocks, out, num_rows, padded_rows, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    ALONG: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply rows in FP8 by an FP8 matrix: ROWS outputs of COLUMNS rows of the batch a program.

    x: float8 [num_rows, DEPTH]; x_scales: float32 [DEPTH / 128, padded_rows]. numbers: float8 [OUTPUTS, DEPTH], the
    matrix units' left side; blocks: float32 [OUTPUTS / 128, ALONG] their scales. out: [num_rows, OUTPUTS].
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(output, OUTPUTS - 1)
    k = tl.arange(0, _COLUMNS)
    ok = column < num_rows
    w_at = numbers + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
    x_at = x + column.to(tl.int64)[None, :] * DEPTH + k[:, None]
    scale_at = blocks + row // _COLUMNS * ALONG
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(0, DEPTH // _COLUMNS, num_stages=STAGES):
        w = tl.load(w_at + block * _COLUMNS)
        x_block = tl.load(x_at + block * _COLUMNS, mask=ok[None, :], other=0.0)
        of_rows = tl.load(x_scales + block * padded_rows + column, mask=ok, other=0.0)
        of_weights = tl.load(scale_at + block)
        acc = tl.fma(tl.dot(w, x_block), of_weights[:, None] * of_rows[None, :], acc)
    at = out + column.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & ok[None, :])


def fp8_product(x: Fp8Rows, linear: Linear, out: torch.Tensor, num_rows: int, columns: int = 0) -> None:
    """out = the rounded accumulators of x @ weight.T, by our kernel: where the vendor's library has none. out: bfloat16
    [num_rows or more, outputs], contiguous. columns: rows of the batch that a program has; 0: by their number."""
    weight = linear.quantized
    assert isinstance(weight, Fp8Weight)
    outputs, depth = weight.shape
    columns = columns or max(_LEAST_ROWS, min(_MOST_ROWS, triton.next_power_of_2(num_rows)))
    _fp8_product_kernel[(ceil_div(num_rows, columns), ceil_div(outputs, _TILE))](
        x.numbers,
        x.scales,
        weight.numbers,
        weight.blocks,
        out,
        num_rows,
        len(x),
        OUTPUTS=outputs,
        DEPTH=depth,
        ALONG=weight.blocks.shape[1],
        COLUMNS=columns,
        ROWS=_TILE,
        STAGES=_STAGES,
        num_warps=4,
        enable_fp_fusion=False,
    )


def takes_groups(weight: Fp8Weight, num_rows: int) -> bool:
    """Return whether `fp8_hopper.py` takes the least time where it can compute a product. One program
    computes a tile of 64 outputs: a matrix that is deeper than wide has few of them."""
    outputs, depth = weight.shape
    return num_rows <= (_GROUPS_ROWS if outputs >= depth else _GROUPS_FEW_ROWS)


def fp8_sums(
    x: torch.Tensor | Fp8Rows,
    linear: Linear,
    num_rows: int,
    depends: Callable[[bool], bool],
) -> torch.Tensor:
    """The rounded accumulators of x @ weight.T, without the scales of channels and the bias. x: bfloat16 [num_rows,
    in], or in FP8. depends: whether the next kernel is launched programmatically, if that is wanted. Returns bfloat16
    [num_rows, outputs]."""
    assert isinstance(linear.quantized, Fp8Weight)
    rows = x if isinstance(x, Fp8Rows) else fp8_rows(x.contiguous(), num_rows, depends(True))
    out = torch.empty((len(rows), linear.weight.shape[0]), dtype=linear.quantized.dtype, device=rows.numbers.device)
    gpu = current_gpu()
    if gpu is not None and gpu.capability == _GROUPS_CAPABILITY and takes_groups(linear.quantized, num_rows):
        # Gluon is experimental and may change: import it only where it is needed.
        from runahead.runtime.kernels.triton.gemm.fp8_hopper import fp8_group_product

        fp8_group_product(rows, linear.quantized, out, num_rows, depends(True), gpu.multiprocessors)
        return out[:num_rows]
    library = vendor_library()
    if library is None or not library.product(rows, Linear(linear.weight, None, linear.quantized), out, _chain):
        fp8_product(rows, linear, out, num_rows)
    return out[:num_rows]


def _chain(x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor) -> None:
    assert isinstance(x, Fp8Rows)
    fp8_product(x, linear, out, len(x))
