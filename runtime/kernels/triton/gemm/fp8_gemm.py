"""Products of rows with an FP8 matrix, both sides in FP8, what follows after in the same kernel.

The weights are the matrix units' left side, the rows their right side (`fp8_rows.py`). 128 columns are multiplied and
summed by the matrix units; one float32 accumulator for each output then adds, in ascending order, that sum times the
row's scale, rounded, times the weights' scale, not rounded before it is added (`fma`). The vendor's library computes
the same with a scale for each 128 columns of both sides; its kernels are compared while the service warms up.

So the bits of a row do not depend on the tiling, on the number of rows, or on which of both computes it.

Source of the scheme: DeepSeek-V3 Technical Report, section 3.3.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS
from runahead.runtime.kernels.triton.gemm import gemv
from runahead.runtime.kernels.triton.gemm.cublaslt import vendor_library
from runahead.runtime.kernels.triton.gemm.epilogue import GATED, end_rows, end_weights, gated_row, product_end
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows, fp8_rows
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, current_gpu
from runahead.runtime.kernels.triton.gpu.pdl import (
    dependent_launch_works,
    let_dependents_start,
    wait_for_predecessors,
)
from runahead.runtime.rounding import ceil_div

_COLUMNS = tl.constexpr(FP8_COLUMNS)
_TILE: Final = 64  # outputs of a program, as the matrix units take them
_LEAST_ROWS: Final = 16  # rows of the batch that the matrix units take
_MOST_ROWS: Final = 64  # rows of the batch that a program has
_FEW_OUTPUTS: Final = 8192  # of which a program needs more bytes on their way than of many
FP8_ROWS: Final = 16  # of more rows of the batch, the vendor's library and what follows it take less time


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """rows: outputs of a program, of both halves together where there are two. columns: rows of the batch that it has,
    at most. stages: blocks of 128 columns on their way at a time."""

    rows: int
    columns: int
    stages: int


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_product_kernel(
    x, x_scales, numbers, scales, bias, squares_in, out, gamma, scaled, squares_out, eps, num_rows, padded_rows,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SQUARES: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs, and of GATED as many of the second half, and COLUMNS rows of the batch."""
    let_dependents_start(DEPENDENT)
    tile = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    HALVES: tl.constexpr = 2 if EPILOGUE == GATED else 1
    r = tl.arange(0, HALVES * ROWS)
    if EPILOGUE == GATED:
        row = gated_row(tile, r, OUTPUTS, ROWS)
    else:
        row = tl.minimum(tile * ROWS + r, OUTPUTS - 1)
    k = tl.arange(0, _COLUMNS)
    ok = column < num_rows
    w_at = numbers + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
    x_at = x + column.to(tl.int64)[None, :] * DEPTH + k[:, None]
    weights = end_weights(tile, bias, gamma, OUTPUTS, ROWS, EPILOGUE, HAS_BIAS)
    if DEPENDENT:  # the first weights are on their way to the L2 cache before it waits
        first = tl.arange(0, 8)[None, :] * _COLUMNS
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
            [numbers + row.to(tl.int64)[:, None] * DEPTH + tl.minimum(first, DEPTH - _COLUMNS)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    wait_for_predecessors(DEPENDENT)
    rows = end_rows(tile, column, squares_in, out, num_rows, OUTPUTS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE)
    acc = tl.zeros([HALVES * ROWS, COLUMNS], tl.float32)
    for block in tl.range(0, DEPTH // _COLUMNS, num_stages=STAGES):
        w = tl.load(w_at + block * _COLUMNS)
        x_block = tl.load(x_at + block * _COLUMNS, mask=ok[None, :], other=0.0)
        of_rows = tl.load(x_scales + block * padded_rows + column, mask=ok, other=0.0)
        of_outputs = tl.load(scales + block * (HALVES * OUTPUTS) + row)
        sums = tl.dot(w, x_block) * of_rows[None, :]
        acc = tl.fma(sums, tl.broadcast_to(of_outputs[:, None], [HALVES * ROWS, COLUMNS]), acc)
    product_end(
        acc, tile, column, weights, rows, squares_in, out, out, scaled, squares_out, eps, num_rows,
        OUTPUTS, DEPTH, COLUMNS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE, HAS_BIAS, False, GELU, True,
    )  # fmt: skip


def fp8_tiling(outputs: int, num_rows: int) -> Fp8Tiling:
    """How a product of so many rows is cut. No bit depends on it. outputs: rows of the matrix. The numbers of stages
    are the fastest of a few that were timed on an H200 for the products of an 8B model."""
    columns = max(_LEAST_ROWS, min(_MOST_ROWS, triton.next_power_of_2(num_rows)))
    gpu = current_gpu()
    room = LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory
    stages = room // (FP8_COLUMNS * (_TILE + columns) + 4 * (_TILE + columns))
    return Fp8Tiling(_TILE, columns, min(12 if outputs <= _FEW_OUTPUTS else 7, stages))


def fp8_product(
    x: Fp8Rows,
    linear: Linear,
    out: torch.Tensor,
    epilogue: int,
    num_rows: int,
    tiling: Fp8Tiling | None = None,
    *,
    squares: tuple[torch.Tensor, int, float] | None = None,
    norm: Norm | None = None,
    residual: Residual | None = None,
    activation: Activation = "silu",
    dependent: bool = False,
) -> int:
    """As `small_batch_product`, rounded, with an FP8 matrix. tiling: None takes the one for so many rows. Returns how
    many tiles of outputs there are."""
    weight = linear.quantized
    assert weight is not None and weight.group == FP8_COLUMNS
    outputs, depth = weight.shape
    halves = 2 if epilogue == gemv.GATED else 1
    tiling = fp8_tiling(outputs, num_rows) if tiling is None else tiling
    outputs //= halves
    rows = tiling.rows // halves
    found, tiles, eps = squares if squares is not None else (x.scales, 0, 0.0)
    stride = found.shape[1] if squares is not None else 0
    gamma, scaled, left = out, out, out
    if epilogue == gemv.ADD:
        assert norm is not None and residual is not None
        gamma, scaled, left = norm.weight, residual.scaled, residual.squares
        stride = left.shape[1]
    tiles_out = ceil_div(outputs, rows)
    options: dict[str, Any] = {"launch_pdl": True} if dependent and dependent_launch_works() else {}
    _fp8_product_kernel[(ceil_div(num_rows, tiling.columns), tiles_out)](
        x.numbers,
        x.scales,
        weight.numbers.view(torch.float8_e4m3fn),
        weight.scales,
        out if linear.bias is None else linear.bias,
        found,
        out,
        gamma,
        scaled,
        left,
        eps,
        num_rows,
        len(x),
        OUTPUTS=outputs,
        DEPTH=depth,
        COLUMNS=tiling.columns,
        ROWS=rows,
        STAGES=tiling.stages,
        SQUARES=tiles,
        STRIDE=stride,
        STEP=max(1, min(triton.next_power_of_2(max(tiles, 1)), 1024 // tiling.columns)),
        EPILOGUE=epilogue,
        HAS_BIAS=linear.bias is not None,
        DEPENDENT=bool(options),
        GELU=is_gelu(activation),
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )
    return tiles_out


def fp8_sums(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x @ weight.T without the bias: by the vendor's library where it was found to have the bits of `fp8_product`, or
    else by that. x: bfloat16 [T, in]. Returns [T, outputs]."""
    rows, plain = fp8_rows(x.contiguous(), len(x)), Linear(linear.weight, None, linear.quantized)
    out = x.new_empty((len(rows), linear.weight.shape[0]))
    library = vendor_library()
    if library is None or not library.product(rows, plain, out, _chain):
        fp8_product(rows, plain, out, gemv.STORE, len(x))
    return out[: len(x)]


def _chain(x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor) -> None:
    assert isinstance(x, Fp8Rows)
    fp8_product(x, linear, out, gemv.STORE, len(x))
