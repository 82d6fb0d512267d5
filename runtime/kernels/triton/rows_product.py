"""Products of a few rows with a matrix, on the matrix units, the norm before and what follows after in the same kernel.

The weights are the matrix units' left side, 64 or more of their rows a program, and the few rows of the batch their
right side. The depth may be split over programs: each leaves its partial sum, and the one that comes last adds them all
up in order, so that the result does not depend on who that is.

A norm's scale is a number for each row, so it is applied to the sums: whoever made the residual has left it multiplied
by the norm's weight, and the sums of its squares by tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Linear, Norm
from runahead.runtime.kernels.triton.dependent_launch import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.row_product import ADD, GATED
from runahead.runtime.kernels.triton.tilings import SPLIT_WORDS, Tiling
from runahead.runtime.rounding import ceil_div

LEAST_COLUMNS: Final = 8  # that the matrix units take
_ADD, _GATED = tl.constexpr(ADD), tl.constexpr(GATED)


@triton.jit
def _epilogue(
    acc, tile, bias, squares_in, out, gamma, scaled, squares_out, eps, num_rows, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """acc: [ROWS outputs, COLUMNS rows of the batch]; GATED: [2 * ROWS, COLUMNS], as `_gated_row` has them."""
    output = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    ok = (output < OUTPUTS)[:, None] & (column < num_rows)[None, :]
    at = column.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    if SQUARES > 0:
        PAD: tl.constexpr = triton.next_power_of_2(SQUARES)
        s = tl.arange(0, PAD)
        made = (s < SQUARES)[:, None] & (column < num_rows)[None, :]
        found = tl.load(squares_in + s[:, None] * COLUMNS + column[None, :], mask=made, other=0.0)
        acc *= tl.rsqrt(tl.sum(found, 0) / DEPTH + eps)[None, :]
    if EPILOGUE == _GATED:
        pairs = tl.permute(tl.reshape(acc, [ROWS // 8, 2, 8, COLUMNS]), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        gate = tl.reshape(gate, [ROWS, COLUMNS])
        up = tl.reshape(up, [ROWS, COLUMNS])
        if HAS_BIAS:
            gate += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        acc = gate / (1.0 + tl.exp(-gate)) * up
    elif HAS_BIAS:
        acc += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE == _ADD:
        acc += tl.load(out + at, mask=ok, other=0.0).to(tl.float32)
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=ok)
    if EPILOGUE == _ADD:
        value = rounded.to(tl.float32)
        weight = tl.load(gamma + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(scaled + at, (value * weight[:, None]).to(scaled.dtype.element_ty), mask=ok)
        squares = tl.sum(tl.where(ok, value * value, 0.0), 0)
        tl.store(squares_out + tile * COLUMNS + column, squares)


@triton.jit
def _gated_row(tile, r, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """The row of the weights that is row r of a tile's [2 * ROWS]. Eight rows of the gate and the eight of `up` that
    belong to them stand by turns: the matrix units leave a row and the eighth after it to the same thread."""
    output = tl.minimum(tile * ROWS + r // 16 * 8 + r % 8, OUTPUTS - 1)
    return output + (r // 8) % 2 * OUTPUTS


@triton.jit(do_not_specialize=["num_rows"])
def _rows_product_kernel(
    x, weight, bias, squares_in, out, gamma, scaled, squares_out, partial, arrived, eps, num_rows,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, SQUARES: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HELD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs and a part of the depth."""
    let_dependents_start(DEPENDENT)
    tile, split = tl.program_id(0), tl.program_id(1)
    PART: tl.constexpr = DEPTH // SPLITS
    TILE_ROWS: tl.constexpr = 2 * ROWS if EPILOGUE == _GATED else ROWS
    r = tl.arange(0, TILE_ROWS)
    if EPILOGUE == _GATED:
        row = _gated_row(tile, r, OUTPUTS, ROWS)
    else:
        row = tl.minimum(tile * ROWS + r, OUTPUTS - 1)
    column = tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)
    w_at = weight + row.to(tl.int64)[:, None] * DEPTH + split * PART + k[None, :]
    x_at = x + column[None, :] * DEPTH + split * PART + k[:, None]
    ok = (column < num_rows)[None, :]
    acc = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
    if HELD:  # the program's first weights are on their way before it waits
        w = tl.load(w_at)
    wait_for_predecessors(DEPENDENT)
    if HELD:
        acc = tl.dot(w, tl.load(x_at, mask=ok, other=0.0), acc, input_precision="ieee")
    for first in tl.range(BLOCK if HELD else 0, PART, BLOCK, num_stages=STAGES):
        w = tl.load(w_at + first)
        acc = tl.dot(w, tl.load(x_at + first, mask=ok, other=0.0), acc, input_precision="ieee")
    if SPLITS == 1:
        _epilogue(
            acc, tile, bias, squares_in, out, gamma, scaled, squares_out, eps, num_rows, OUTPUTS, DEPTH, COLUMNS, ROWS,
            SQUARES, EPILOGUE, HAS_BIAS,
        )  # fmt: skip
    else:
        SIZE: tl.constexpr = TILE_ROWS * COLUMNS
        mine = partial + tile * SPLITS * SIZE + r[:, None] * COLUMNS + column[None, :]
        tl.store(mine + split * SIZE, acc)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + tile, 0)
            acc = tl.load(mine, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                acc += tl.load(mine + s * SIZE, cache_modifier=".cg")
            _epilogue(
                acc, tile, bias, squares_in, out, gamma, scaled, squares_out, eps, num_rows, OUTPUTS, DEPTH, COLUMNS,
                ROWS, SQUARES, EPILOGUE, HAS_BIAS,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual of R rows, and what the products that follow read."""

    values: torch.Tensor  # [R, hidden]
    scaled: torch.Tensor  # [R, hidden] times the weight of the norm that follows
    squares: torch.Tensor  # float32 [tiles, columns] sums of squares, as many tiles as the last writer had


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Where the programs of a split product meet. One product at a time uses it."""

    partial: torch.Tensor  # float32 [n]
    arrived: torch.Tensor  # int32 [tiles], zero between products


def columns_of(num_rows: int) -> int:
    """How many rows of the batch a program's tile has: as the matrix units take them."""
    return max(1 << (num_rows - 1).bit_length(), LEAST_COLUMNS)


def rows_product(
    x: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    epilogue: int,
    tiling: Tiling,
    scratch: SplitScratch | None,
    num_rows: int,
    *,
    squares: tuple[torch.Tensor, int, float] | None = None,
    norm: Norm | None = None,
    residual: Residual | None = None,
) -> None:
    """out (epilogue)= x @ weight.T + bias, for the first `num_rows` rows; rows past them are written by nobody.

    x: [num_rows or more, in], `in` a multiple of tiling.block * tiling.splits. linear: weight [out, in], twice as many
    rows if GATED. squares: x is a `scaled` residual, whose sums of squares these are: float32 [tiles, columns], how
    many tiles, and the norm's eps. ADD: `out` is residual.values, and the rest of `residual` is made for `norm`.
    """
    outputs, depth = linear.weight.shape
    outputs //= 2 if epilogue == GATED else 1
    found, tiles, eps = squares if squares is not None else (x, 0, 0.0)
    if scratch is None:
        assert tiling.splits == 1
        scratch = SplitScratch(x, x)
    if epilogue == ADD:
        assert norm is not None and residual is not None
        gamma, scaled, left = norm.weight, residual.scaled, residual.squares
    else:
        gamma, scaled, left = x, x, x
    tiles_out, columns = ceil_div(outputs, tiling.rows), columns_of(num_rows)
    assert tiles_out <= scratch.arrived.shape[0] or tiling.splits == 1
    assert epilogue != ADD or tiles_out <= left.shape[0]
    if tiling.splits > 1:
        assert tiles_out * tiling.rows * columns * tiling.splits * (linear.weight.shape[0] // outputs) <= SPLIT_WORDS
    options: dict[str, Any] = {"launch_pdl": True} if tiling.dependent else {}
    _rows_product_kernel[(tiles_out, tiling.splits)](
        x,
        linear.weight,
        linear.weight if linear.bias is None else linear.bias,
        found,
        out,
        gamma,
        scaled,
        left,
        scratch.partial,
        scratch.arrived,
        eps,
        num_rows,
        OUTPUTS=outputs,
        DEPTH=depth,
        COLUMNS=columns,
        ROWS=tiling.rows,
        BLOCK=tiling.block,
        SPLITS=tiling.splits,
        STAGES=tiling.stages,
        SQUARES=tiles,
        EPILOGUE=epilogue,
        HAS_BIAS=linear.bias is not None,
        HELD=tiling.held,
        DEPENDENT=tiling.dependent,
        num_warps=tiling.warps,
        **options,
    )
