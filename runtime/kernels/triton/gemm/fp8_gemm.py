"""Products of rows with an FP8 matrix, which is dequantized in registers, what follows after in the same kernel.

The weights are the matrix units' left side. A thread loads 16 bytes of a row, `QuantizedWeight.in_panels` has put them
in the order in which the matrix units read a thread's registers: nothing moves between threads after the load. Four
bytes become four bfloat16 numbers by seven instructions on 32 bits each: shifts put exponent and mantissa where
bfloat16 has them, and one multiplication by scale * 2**120 corrects the exponent's bias and rounds, once.

One float32 accumulator an output walks the depth upwards in steps of 16, whatever the tiling and the number of rows. So
the bits are those of the dequantized matrix.

For many rows the whole matrix is dequantized first and the vendor's library computes the product, where it was found to
have the same bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)
# mypy: disable-error-code="assignment"
# (nor has a tuple that grows)
# ruff: noqa: RUF005
# (Triton compiles no starred expression)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.quantized_weight import PANEL_COLUMNS, PANEL_ROWS, QuantizedWeight
from runahead.runtime.kernels.triton.gemm import gemv
from runahead.runtime.kernels.triton.gemm.epilogue import GATED, end_rows, end_weights, product_end
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, current_gpu
from runahead.runtime.kernels.triton.gpu.pdl import (
    dependent_launch_works,
    let_dependents_start,
    wait_for_predecessors,
)
from runahead.runtime.rounding import ceil_div

_GRAIN = tl.constexpr(PANEL_COLUMNS)
_PANEL = tl.constexpr(PANEL_ROWS)
_LINE = tl.constexpr(128)  # bytes of the L2 cache
_LINES = tl.constexpr(32)  # of a panel that a program asks for before it waits
_GRAINS_AT_ONCE: Final = 16
_LEAST_COLUMNS: Final = 8
FP8_ROWS: Final = 256  # of more rows of the batch, dequantizing the matrix first takes less time


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """rows: outputs of a program, 16 or more, and of both halves together where there are two. columns: rows of the
    batch that it has, at most. grains: 1, 2 or 4 times 64 of the depth, at a time. stages: of these on their way at a
    time. warps: a warp has 16 outputs."""

    rows: int
    columns: int
    grains: int
    stages: int
    warps: int


@triton.jit
def _decoded(stored, scale, ON_GPU: tl.constexpr):
    """Numbers times scale as bfloat16, rounded once. stored: uint8 [ROWS, 64], of a word of four bytes the first two
    numbers in bytes 0 and 2, the others in 1 and 3. scale: bfloat16 [ROWS, 1], times 2**120. Returns [ROWS, 64]."""
    ROWS: tl.constexpr = stored.shape[0]
    spread = tl.broadcast_to(scale, [ROWS, _GRAIN])
    if ON_GPU:
        made = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, z;
            mov.b32 z, 0x80008000;
            shl.b32 t, $2, 4;
            and.b32 t, t, 0x07f007f0;
            shl.b32 s, $2, 8;
            lop3.b32 s, s, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $0, s, $3, z;
            shr.u32 t, $2, 4;
            and.b32 t, t, 0x07f007f0;
            lop3.b32 s, $2, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $1, s, $4, z;
            }""",
            "=r,=r,r,r,r",
            [stored, spread],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        pairs = tl.permute(tl.reshape(stored, [ROWS, _GRAIN // 4, 2, 2]), (0, 1, 3, 2))
        bits = tl.reshape(pairs, [ROWS, _GRAIN]).to(tl.uint32)
        bits = (bits & 128) << 24 | (bits & 127) << 20
        made = (bits.to(tl.float32, bitcast=True) * spread.to(tl.float32)).to(tl.bfloat16)
    return made


@triton.jit
def _panels(tile, i, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, EPILOGUE: tl.constexpr):
    """The two panels of which the i-th 16 outputs of a tile are made; of GATED as `gated_row` has them."""
    PANELS: tl.constexpr = OUTPUTS // _PANEL
    if EPILOGUE == GATED:
        low = tl.minimum(tile * (ROWS // _PANEL) + i, PANELS - 1)
        high = low + PANELS
    else:
        low = tl.minimum(tile * (ROWS // _PANEL) + 2 * i, PANELS - 1)
        high = tl.minimum(low + 1, PANELS - 1)
    return low, high


@triton.jit
def _ask_for(panel, numbers, DEPTH: tl.constexpr):
    """Have the beginning of panels brought into the L2 cache."""
    at = numbers + panel.to(tl.int64)[:, None] * (_PANEL * DEPTH) + tl.arange(0, _LINES)[None, :] * _LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _scale(scales, row):
    """bfloat16 [ROWS, 1], times 2**120."""
    found = tl.load(scales + row).to(tl.float32) * 1329227995784915872903807060280344576.0
    return found.to(tl.bfloat16)[:, None]


@triton.jit
def _side(low, high):
    """Panels of rows 0 to 7 and 8 to 15 of each warp, [WARPS * 8, 64], as one side of a product, [WARPS * 16, 64]. Of
    the 16 numbers of a thread, four belong to each step of the matrix units."""
    WARPS: tl.constexpr = low.shape[0] // 8
    # Warps, rows, then of a row: threads, steps, halves of a step, pairs; low or high.
    side = tl.reshape(tl.join(low, high), [WARPS, 8, 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(side, (0, 6, 1, 3, 4, 2, 5)), [WARPS * 16, _GRAIN])


@triton.jit
def _together(w):
    """Sides one after the other along the depth."""
    ROWS: tl.constexpr = w[0].shape[0]
    if len(w) == 1:
        found = w[0]
    elif len(w) == 2:
        found = tl.reshape(tl.permute(tl.join(w[0], w[1]), (0, 2, 1)), [ROWS, 2 * _GRAIN])
    else:
        four = tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3]))
        found = tl.reshape(tl.permute(four, (0, 2, 3, 1)), [ROWS, 4 * _GRAIN])
    return found


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_product_kernel(
    x, numbers, scales, bias, squares_in, out, gamma, scaled, squares_out, eps, num_rows,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GRAINS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, SQUARES: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, DEPENDENT: tl.constexpr, GELU: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs, and of GATED as many of the second half, and COLUMNS rows of the batch."""
    let_dependents_start(DEPENDENT)
    tile = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    HALVES: tl.constexpr = 2 if EPILOGUE == GATED else 1
    BLOCK: tl.constexpr = GRAINS * _GRAIN
    q = tl.arange(0, HALVES * ROWS // 2)
    panel, later = _panels(tile, q // 8, OUTPUTS, ROWS, EPILOGUE)
    inside = (q % 8 * _GRAIN)[:, None] + tl.arange(0, _GRAIN)[None, :]
    low_at = numbers + (panel.to(tl.int64) * (_PANEL * DEPTH))[:, None] + inside
    high_at = numbers + (later.to(tl.int64) * (_PANEL * DEPTH))[:, None] + inside
    low_row = scales + panel * _PANEL + q % 8
    high_row = scales + later * _PANEL + q % 8
    x_at = x + column.to(tl.int64)[None, :] * DEPTH + tl.arange(0, BLOCK)[:, None]
    ok = (column < num_rows)[None, :]
    low_scale = _scale(low_row, 0)
    high_scale = _scale(high_row, 0)
    weights = end_weights(tile, bias, gamma, OUTPUTS, ROWS, EPILOGUE, HAS_BIAS)
    if DEPENDENT:
        low_panel, high_panel = _panels(tile, tl.arange(0, HALVES * ROWS // 16), OUTPUTS, ROWS, EPILOGUE)
        _ask_for(low_panel, numbers, DEPTH)
        _ask_for(high_panel, numbers, DEPTH)
    wait_for_predecessors(DEPENDENT)
    rows = end_rows(tile, column, squares_in, out, num_rows, OUTPUTS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE)
    acc = tl.zeros([HALVES * ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
        lines = tl.load(x_at + begin, mask=ok, other=0.0)
        w = ()
        for g in tl.static_range(GRAINS):
            low = tl.load(low_at + (begin + g * _GRAIN) * _PANEL)
            high = tl.load(high_at + (begin + g * _GRAIN) * _PANEL)
            w = w + (_side(_decoded(low, low_scale, ON_GPU), _decoded(high, high_scale, ON_GPU)),)
        made = _together(w)
        if ON_GPU:  # or the compiler sees 8 bits as the operand's width and adds columns in another order
            made = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [made], dtype=tl.bfloat16, is_pure=False, pack=2
            )
        acc = tl.dot(made, lines, acc)
        if GROUP < DEPTH:
            group = tl.minimum(begin + BLOCK, DEPTH - BLOCK) // GROUP * (HALVES * OUTPUTS)
            low_scale = _scale(low_row, group)
            high_scale = _scale(high_row, group)
    product_end(
        acc, tile, column, weights, rows, squares_in, out, out, scaled, squares_out, eps, num_rows,
        OUTPUTS, DEPTH, COLUMNS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE, HAS_BIAS, False, GELU, True,
    )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    numbers, scales, out, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, GRAINS: tl.constexpr, GROUP: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """One program for a panel of eight outputs and GRAINS times 64 of their columns."""
    panel = tl.program_id(0)
    q = tl.arange(0, GRAINS * 8)
    grain = tl.program_id(1) * GRAINS + q // 8
    row = panel * _PANEL + q % 8
    ok = (grain * _GRAIN < DEPTH)[:, None]
    k = tl.arange(0, _GRAIN)[None, :]
    at = panel.to(tl.int64) * (_PANEL * DEPTH) + (grain * (_GRAIN * _PANEL) + q % 8 * _GRAIN)[:, None] + k
    stored = tl.load(numbers + at, mask=ok, other=0)
    group = tl.minimum(grain, DEPTH // _GRAIN - 1) * _GRAIN // GROUP
    made = _decoded(stored, _scale(scales, group * OUTPUTS + row), ON_GPU)
    made = tl.permute(tl.reshape(made, [GRAINS * 8, 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    made = tl.reshape(made, [GRAINS * 8, _GRAIN])
    tl.store(out + row.to(tl.int64)[:, None] * DEPTH + grain[:, None] * _GRAIN + k, made, mask=ok)


def fp8_tiling(outputs: int, depth: int, group: int, num_rows: int) -> Fp8Tiling:
    """How a product of so many rows is cut. No bit depends on it. outputs: rows of the matrix. group: columns that
    share a scale. The sizes are the fastest of a few that were timed on an H200 for two products of an 8B model."""
    columns = max(_LEAST_COLUMNS, min(128, triton.next_power_of_2(num_rows)))
    rows = 64 if columns <= 64 else 128
    grains = 4 if depth % 256 == 0 and columns <= 64 and group >= depth else 2 if depth % 128 == 0 else 1
    few = columns <= 16 and outputs <= 8192
    gpu = current_gpu()
    room = LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory
    stages = room // (PANEL_COLUMNS * grains * (rows + 2 * columns))
    return Fp8Tiling(rows, columns, grains, max(2, min(7 if few else 4 if columns <= 32 else 3, stages)), rows // 16)


def fp8_product(
    x: torch.Tensor,
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
    """As `small_batch_product`, rounded, with an FP8 matrix in panels. tiling: None takes the one for so many rows.
    Returns how many tiles of outputs there are."""
    weight = linear.quantized
    assert weight is not None and weight.in_panels
    outputs, depth = weight.shape
    halves = 2 if epilogue == gemv.GATED else 1
    tiling = fp8_tiling(outputs, depth, weight.group, num_rows) if tiling is None else tiling
    outputs //= halves
    rows = tiling.rows // halves
    columns = min(tiling.columns, max(triton.next_power_of_2(num_rows), _LEAST_COLUMNS))
    found, tiles, eps = squares if squares is not None else (x, 0, 0.0)
    stride = found.shape[1] if squares is not None else 0
    gamma, scaled, left = x, x, x
    if epilogue == gemv.ADD:
        assert norm is not None and residual is not None
        gamma, scaled, left = norm.weight, residual.scaled, residual.squares
        stride = left.shape[1]
    tiles_out = ceil_div(outputs, rows)
    options: dict[str, Any] = {"launch_pdl": True} if dependent and dependent_launch_works() else {}
    _fp8_product_kernel[(ceil_div(num_rows, columns), tiles_out)](
        x,
        weight.numbers,
        weight.scales,
        x if linear.bias is None else linear.bias,
        found,
        out,
        gamma,
        scaled,
        left,
        eps,
        num_rows,
        OUTPUTS=outputs,
        DEPTH=depth,
        COLUMNS=columns,
        ROWS=rows,
        GRAINS=tiling.grains,
        GROUP=weight.group,
        STAGES=tiling.stages,
        SQUARES=tiles,
        STRIDE=stride,
        STEP=max(1, min(triton.next_power_of_2(max(tiles, 1)), 1024 // columns)),
        EPILOGUE=epilogue,
        HAS_BIAS=linear.bias is not None,
        DEPENDENT=bool(options),
        GELU=is_gelu(activation),
        ON_GPU=current_gpu() is not None,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        **options,
    )
    return tiles_out


def dequantized_in_16_bits(weight: QuantizedWeight) -> torch.Tensor:
    """The matrix that a product multiplies with, bfloat16 [out, in]. weight: FP8 in panels."""
    outputs, depth = weight.shape
    out = torch.empty((outputs, depth), dtype=torch.bfloat16, device=weight.numbers.device)
    _dequantize_kernel[(outputs // PANEL_ROWS, ceil_div(depth // PANEL_COLUMNS, _GRAINS_AT_ONCE))](
        weight.numbers, weight.scales, out, OUTPUTS=outputs, DEPTH=depth, GRAINS=_GRAINS_AT_ONCE, GROUP=weight.group,
        ON_GPU=current_gpu() is not None, num_warps=4,
    )  # fmt: skip
    return out
