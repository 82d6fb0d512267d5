"""Products of rows with an INT4 matrix, dequantized in registers, with their epilogue in the same kernel.

The weights are the matrix units' left side. `QuantizedWeight.in_panels` has stored eight rows and 128 columns as 512
contiguous bytes, in the order in which the matrix units read a thread's registers: nothing moves between threads after
the load.

Each part of the depth, in large products the whole of it, has one float32 accumulator, which walks upwards in steps of
16 for every tiling and number of rows. So the bits are the dequantized matrix's, one sum a segment.

For many rows the whole matrix is dequantized first, and the kernels of 16 bits multiply.

These kernels take no part in dependent launch: programs that started early met on the processors that the kernel before
left first, and were two to three times slower for the rest of the product.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.quantized_weight import PANEL_COLUMNS, PANEL_ROWS, QuantizedWeight
from runahead.runtime.kernels.triton.gemm.epilogue import GATED, end_rows, end_weights, product_end
from runahead.runtime.kernels.triton.gemm.int4_numbers import WORDS, decoded, scales_of
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import (
    Residual,
    SplitScratch,
    end_of,
    small_batch_product,
)
from runahead.runtime.kernels.triton.gemm.tuning import Tiling
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, current_gpu
from runahead.runtime.kernels.triton.gpu.unrolled import joined
from runahead.runtime.rounding import ceil_div

_BLOCK = tl.constexpr(PANEL_COLUMNS)
_PANEL = tl.constexpr(PANEL_ROWS)
_GATED = tl.constexpr(GATED)
_LEAST_COLUMNS: Final = 8
_MOST_COLUMNS: Final = 128
INT4_ROWS: Final = 256  # of more rows of the batch, dequantizing the matrix first takes less time


@dataclass(frozen=True, slots=True)
class Int4Tiling:
    """Tile sizes of a product. rows: outputs of a program, 16 for each of its warps; both halves of GATED together.
    columns: rows of the batch of a program, at most. stages: blocks of 128 columns on their way at a time, times
    unroll."""

    rows: int
    columns: int
    stages: int
    unroll: int = 1


@triton.jit
def _part(
    low_at, high_at, low_scale, high_scale, x_at, ok, acc, first, last, STRIDE: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, HALF: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Add the blocks of 128 columns from `first` to `last` to `acc`. STRIDE: scales of a group."""
    GROUPS: tl.constexpr = 1 if GROUP >= _BLOCK else _BLOCK // GROUP
    WARPS: tl.constexpr = low_at.shape[0] // 8
    for begin in tl.range(first, last, UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            block = begin + u
            lines = tl.load(x_at + block * _BLOCK, mask=ok, other=0.0)
            low = tl.load(low_at + block * (WORDS * _PANEL))
            high = tl.load(high_at + block * (WORDS * _PANEL))
            group = block * _BLOCK // GROUP * STRIDE
            of_low = scales_of(low_scale + group, GROUPS, STRIDE)
            of_high = scales_of(high_scale + group, GROUPS, STRIDE)
            low_parts = joined(decoded(low, of_low, HALF, ON_GPU))
            high_parts = joined(decoded(high, of_high, HALF, ON_GPU))
            # Warps, rows, then of a row: threads, pairs of words, pairs of columns, words, steps, halves; low or high.
            parts = tl.reshape(tl.join(low_parts, high_parts), [WARPS, 8, 4, 2, 2, 2, 2, 2, 2])
            made = tl.reshape(tl.permute(parts, (0, 8, 1, 3, 5, 6, 7, 2, 4)), [WARPS * 16, _BLOCK])
            if ON_GPU:  # or the compiler takes a width of the operand's origin, and columns in another order
                made = tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [made], dtype=tl.bfloat16, is_pure=False, pack=2
                )
            acc = tl.dot(made, lines, acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _int4_product_kernel(
    x, words, scales, out, end, num_rows, SIZES: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, HALF: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs, and of GATED as many of the second half, and COLUMNS rows of the batch."""
    OUTPUTS: tl.constexpr = SIZES.OUTPUTS
    DEPTH: tl.constexpr = SIZES.DEPTH
    ROWS: tl.constexpr = SIZES.ROWS
    COLUMNS: tl.constexpr = SIZES.COLUMNS
    tile = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    HALVES: tl.constexpr = 2 if SIZES.EPILOGUE == _GATED else 1
    BLOCKS: tl.constexpr = DEPTH // _BLOCK // SPLITS
    q = tl.arange(0, HALVES * ROWS // 2)
    # The two panels of which each 16 outputs of a tile are made; of GATED as `gated_row` has them.
    PANELS: tl.constexpr = OUTPUTS // _PANEL
    if HALVES == 2:
        low_panel = tl.minimum(tile * (ROWS // _PANEL) + q // 8, PANELS - 1)
        high_panel = low_panel + PANELS
    else:
        low_panel = tl.minimum(tile * (ROWS // _PANEL) + q // 8 * 2, PANELS - 1)
        high_panel = tl.minimum(low_panel + 1, PANELS - 1)
    inside = (q % 8 * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    low_at = words + (low_panel.to(tl.int64) * DEPTH)[:, None] + inside
    high_at = words + (high_panel.to(tl.int64) * DEPTH)[:, None] + inside
    low_scale = scales + (low_panel * _PANEL + q % 8)[:, None]
    high_scale = scales + (high_panel * _PANEL + q % 8)[:, None]
    x_at = x + column.to(tl.int64)[None, :] * DEPTH + tl.arange(0, _BLOCK)[:, None]
    ok = (column < num_rows)[None, :]
    weights = end_weights(tile, end, SIZES)
    rows = end_rows(tile, column, out, end, num_rows, SIZES)
    acc = tl.zeros([HALVES * ROWS, COLUMNS], tl.float32)
    acc = _part(
        low_at, high_at, low_scale, high_scale, x_at, ok, acc, 0, BLOCKS, HALVES * OUTPUTS, GROUP, STAGES, UNROLL, HALF,
        ON_GPU,
    )  # fmt: skip
    for s in range(1, SPLITS):
        acc += _part(
            low_at, high_at, low_scale, high_scale, x_at, ok, tl.zeros([HALVES * ROWS, COLUMNS], tl.float32),
            s * BLOCKS, (s + 1) * BLOCKS, HALVES * OUTPUTS, GROUP, STAGES, UNROLL, HALF, ON_GPU,
        )  # fmt: skip
    product_end(acc, tile, column, weights, rows, out, end, num_rows, SIZES)


@triton.jit
def _dequantize_kernel(
    words, scales, out, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr,
    HALF: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Dequantize 128 columns of PANELS times eight outputs."""
    q = tl.arange(0, PANELS * 8)
    row = tl.minimum(tl.program_id(1) * (PANELS * 8) + q, OUTPUTS - 8 + q % 8)
    block = tl.program_id(0)
    GROUPS: tl.constexpr = 1 if GROUP >= _BLOCK else _BLOCK // GROUP
    inside = (block * _PANEL + q % 8) * WORDS
    at = (row // 8).to(tl.int64)[:, None] * DEPTH + inside[:, None] + tl.arange(0, WORDS)[None, :]
    of_words = scales_of(scales + (block * _BLOCK // GROUP * OUTPUTS + row)[:, None], GROUPS, OUTPUTS)
    parts = joined(decoded(tl.load(words + at), of_words, HALF, ON_GPU))
    made = tl.permute(tl.reshape(parts, [PANELS * 8, 4, 2, 2, 2, 2, 2]), (0, 2, 4, 5, 6, 1, 3))
    made = tl.reshape(made, [PANELS * 8, _BLOCK])
    k = block * _BLOCK + tl.arange(0, _BLOCK)
    tl.store(out + row.to(tl.int64)[:, None] * DEPTH + k[None, :], made)


def int4_tiling(outputs: int, depth: int, num_rows: int) -> Int4Tiling:
    """Choose the tile sizes, on which no bit depends. outputs, depth: of the matrix. With 8 and 64 rows they are the
    fastest of six to ten that were timed on an H200 for each product of an 8B model."""
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, triton.next_power_of_2(num_rows)))
    wide = outputs > 2 * depth
    if columns == _MOST_COLUMNS:
        few = num_rows <= _MOST_COLUMNS
        tiling = Int4Tiling(128, columns, 3) if few and wide else Int4Tiling(64, 64 if few else columns, 3)
    elif columns == 64 and outputs > 4096:
        tiling = Int4Tiling(128 if wide else 64, columns, 4)
    elif columns > 16:
        tiling = Int4Tiling(64, 32, 3, 2) if depth % (2 * PANEL_COLUMNS) == 0 else Int4Tiling(64, 32, 5)
    elif outputs > 8192:
        tiling = Int4Tiling(64, columns, 5)
    else:
        tiling = Int4Tiling(32, columns, 8)
    gpu = current_gpu()
    room = LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory
    taken = tiling.unroll * (PANEL_COLUMNS // 2 * tiling.rows + 2 * PANEL_COLUMNS * tiling.columns + 16 * tiling.rows)
    return replace(tiling, stages=max(1, min(tiling.stages, room // taken)))


def in_order(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Return rows with their columns in the order of the INT4 matrix. x: [T, in]."""
    assert isinstance(linear.quantized, QuantizedWeight)
    order = linear.quantized.order
    return x if order is None else x.index_select(1, order)


def takes_parts(linear: Linear, splits: int, num_rows: int) -> bool:
    """Return whether `int4_product` takes so many rows and parts of the depth; `in_16_bits` is for others."""
    return num_rows <= INT4_ROWS and not linear.weight.shape[1] % (splits * PANEL_COLUMNS)


def int4_batch_product(
    x: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    epilogue: int,
    tiling: Tiling,
    scratch: SplitScratch,
    num_rows: int,
    **more: Any,
) -> int:
    """Compute what `small_batch_product` does, not in chains, with an INT4 matrix. tiling: for the matrix in 16 bits.
    Returns the number of tiles of outputs."""
    x = in_order(x, linear)
    if takes_parts(linear, tiling.splits, num_rows):
        return int4_product(x, linear, out, epilogue, num_rows, tiling.splits, **more)
    plain, tiling = in_16_bits(linear), replace(tiling, dependent=False)  # the kernel before writes its weights
    small_batch_product(x, plain, out, epilogue, tiling, scratch, num_rows, chained=False, **more)
    return ceil_div(plain.weight.shape[0], tiling.rows)


def int4_product(
    x: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    epilogue: int,
    num_rows: int,
    splits: int = 1,
    tiling: Int4Tiling | None = None,
    *,
    squares: tuple[torch.Tensor, int, float] | None = None,
    norm: Norm | None = None,
    residual: Residual | None = None,
    activation: Activation = "silu",
) -> int:
    """Compute what `small_batch_product` does, not in chains, with an INT4 matrix in panels. splits: parts of the
    depth, each with a sum. tiling: None takes `int4_tiling`. Returns the number of tiles of outputs."""
    weight = linear.quantized
    assert isinstance(weight, QuantizedWeight) and weight.kind == "int4" and weight.in_panels
    outputs, depth = weight.shape
    halves = 2 if epilogue == GATED else 1
    tiling = int4_tiling(outputs, depth // splits, num_rows) if tiling is None else tiling
    assert depth % (splits * tiling.unroll * PANEL_COLUMNS) == 0
    rows = tiling.rows // halves
    columns = min(tiling.columns, max(triton.next_power_of_2(num_rows), _LEAST_COLUMNS))
    end, sizes = end_of(linear, epilogue, (rows, columns), squares, norm, residual, activation)
    tiles_out = ceil_div(sizes.OUTPUTS, rows)
    _int4_product_kernel[(ceil_div(num_rows, columns), tiles_out)](
        x,
        *_tensors(weight),
        out,
        end,
        num_rows,
        SIZES=sizes,
        SPLITS=splits,
        GROUP=weight.group,
        STAGES=tiling.stages,
        UNROLL=tiling.unroll,
        HALF=weight.scales.dtype == torch.float16,
        ON_GPU=current_gpu() is not None,
        num_warps=tiling.rows // 16,
        enable_fp_fusion=False,
    )
    return tiles_out


def in_16_bits(linear: Linear) -> Linear:
    """Return the product with its INT4 matrix dequantized, columns in the order of `in_order`."""
    weight = linear.quantized
    assert isinstance(weight, QuantizedWeight) and weight.kind == "int4" and weight.in_panels
    outputs, depth = weight.shape
    out = torch.empty((outputs, depth), dtype=torch.bfloat16, device=weight.numbers.device)
    _dequantize_kernel[(depth // PANEL_COLUMNS, ceil_div(outputs, 32))](
        *_tensors(weight), out, OUTPUTS=outputs, DEPTH=depth, GROUP=weight.group, PANELS=4,
        HALF=weight.scales.dtype == torch.float16, ON_GPU=current_gpu() is not None, num_warps=4,
    )  # fmt: skip
    return Linear(out, linear.bias)


def _tensors(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales in words of 32 bits."""
    return weight.numbers.view(torch.int32), weight.scales.view(torch.int32)
