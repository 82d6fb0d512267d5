"""Products of rows with a matrix, on the matrix units, the norm before and what follows after in the same kernel.

The weights are the matrix units' left side, 64 or more of their rows a program, and the rows of the batch their right
side. The depth is cut into parts, each is summed by itself, and the parts are added up in order: by one program, or
each part by a separate program; the program that ends last adds them up.

A norm's scale is a number for each row, so it is applied to the sums: the kernel that made the residual has multiplied
it by the norm's weight, and the sums of its squares by tiles.

**The bits of a row** depend on the number of parts and on whether they are summed in chains, and on nothing else of a
tiling. The matrix units add up a part's products in the order of the depth, whatever instruction it is and however many
rows there are (seen on an H200 for mma.sync and wgmma of every width), and sums of squares are exact below 2**23
(`exact_square`), as good as exact above. No product is fused with a sum.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu_tanh
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.triton.gemm.epilogue import (
    ADD,
    GATED,
    STORE,
    End,
    Sizes,
    Squares,
    end_rows,
    end_weights,
    gated_row,
    product_end,
)
from runahead.runtime.kernels.triton.gemm.tuning import (
    LEAST_COLUMNS,
    MOST_DIRECT,
    SPLIT_WORDS,
    Tiling,
    chain_of,
)
from runahead.runtime.kernels.triton.gemm.warp_split_k import (
    GRAIN,
    WARP_OUTPUTS,
    blocks_prefetched,
    warp_split_k_kernel,
)
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.gpu.unrolled import longer
from runahead.runtime.rounding import ceil_div

_SQUARES_WORDS: Final = 1024  # sums of squares that a program asks for at a time
_GATED = tl.constexpr(GATED)


@triton.jit
def _with_block(acc, w, x, zero, CHAINED: tl.constexpr):
    """`acc` and the product of a block. CHAINED: the block is summed by itself, from `zero` on."""
    if CHAINED:
        acc += tl.dot(w, x, zero, input_precision="ieee")
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _part(
    w_at, x_at, ok, acc, zero, first, PART: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """`acc` and what a part of the depth adds from `first` on. Past its end there are zeros."""
    k = tl.arange(0, BLOCK)
    for begin in tl.range(first, PART, BLOCK, num_stages=STAGES):
        if PART % BLOCK == 0:
            w = tl.load(w_at + begin)
            v = tl.load(x_at + begin, mask=ok, other=0.0)
        else:
            inside = begin + k < PART
            w = tl.load(w_at + begin, mask=inside[None, :], other=0.0)
            v = tl.load(x_at + begin, mask=ok & inside[:, None], other=0.0)
        acc = _with_block(acc, w, v, zero, CHAINED)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _rows_product_kernel(
    x, weight, out, end, scratch, num_rows, SIZES: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    SPREAD: tl.constexpr, STAGES: tl.constexpr, PREFETCHED: tl.constexpr, CHAINED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply rows by a matrix and apply the epilogue: ROWS outputs of COLUMNS rows of the batch a program.

    x: [num_rows, DEPTH]. weight: [OUTPUTS, DEPTH], twice as many rows if GATED. SPREAD: each of the SPLITS parts of the
    depth has a program, and the last one to end adds the parts up, which meet in `scratch`.
    """
    let_dependents_start(DEPENDENT)
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = SIZES.ROWS
    COLUMNS: tl.constexpr = SIZES.COLUMNS
    PART: tl.constexpr = SIZES.DEPTH // SPLITS
    TILE_ROWS: tl.constexpr = 2 * ROWS if SIZES.EPILOGUE == _GATED else ROWS
    r = tl.arange(0, TILE_ROWS)
    if SIZES.EPILOGUE == _GATED:
        row = gated_row(tile, r, SIZES.OUTPUTS, ROWS)
    else:
        row = tl.minimum(tile * ROWS + r, SIZES.OUTPUTS - 1)
    column = group * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)
    w_at = weight + row.to(tl.int64)[:, None] * SIZES.DEPTH + split * PART + k[None, :]
    x_at = x + column.to(tl.int64)[None, :] * SIZES.DEPTH + split * PART + k[:, None]
    ok = (column < num_rows)[None, :]
    acc = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
    # No compiler knows that it is 0: it would make one instruction of a product and the sum after it.
    zero = acc + (num_rows < 0).to(tl.float32)
    held = ()
    for i in tl.static_range(PREFETCHED):  # the program's first weights are on their way before it waits
        held = longer(held, tl.load(w_at + i * BLOCK))
    weights = end_weights(tile, end, SIZES)
    wait_for_predecessors(DEPENDENT)
    rows = end_rows(tile, column, out, end, num_rows, SIZES)
    for i in tl.static_range(PREFETCHED):
        acc = _with_block(acc, held[i], tl.load(x_at + i * BLOCK, mask=ok, other=0.0), zero, CHAINED)
    acc = _part(w_at, x_at, ok, acc, zero, PREFETCHED * BLOCK, PART, BLOCK, STAGES, CHAINED)
    if SPREAD:
        SIZE: tl.constexpr = TILE_ROWS * COLUMNS
        meeting = group * tl.num_programs(1) + tile
        mine = scratch.partial + meeting * SPLITS * SIZE + r[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(mine + split * SIZE, acc)
        tl.debug_barrier()
        if tl.atomic_add(scratch.arrived + meeting, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(scratch.arrived + meeting, 0)
            acc = tl.load(mine, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                acc += tl.load(mine + s * SIZE, cache_modifier=".cg")
            product_end(acc, tile, column, weights, rows, out, end, num_rows, SIZES)
    else:
        for s in range(1, SPLITS):
            begin = s * PART
            acc += _part(
                w_at + begin, x_at + begin, ok, tl.zeros([TILE_ROWS, COLUMNS], tl.float32), zero, 0, PART, BLOCK,
                STAGES, CHAINED,
            )  # fmt: skip
        product_end(acc, tile, column, weights, rows, out, end, num_rows, SIZES)


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual of R rows, and what the products that follow read."""

    values: torch.Tensor  # [R, hidden]
    scaled: torch.Tensor  # [R, hidden] times the weight of the norm that follows
    squares: torch.Tensor  # float64 [tiles, R or more] sums of squares, as many tiles as the last writer had


class SplitScratch(NamedTuple):
    """Partial sums and arrival counters of a split product. One product at a time uses them."""

    partial: torch.Tensor  # float32 [n]
    arrived: torch.Tensor  # int32 [tiles], zero between products


def end_of(
    linear: Linear, epilogue: int, tile: tuple[int, int], squares: Squares,
    norm: Norm | None, residual: Residual | None, activation: Activation, targets: torch.Tensor | None = None, *,
    lone: bool = False,
) -> tuple[End, Sizes]:  # fmt: skip
    """Return the tensors and the constants of a product's end. tile: outputs and rows of the batch of one. lone: there
    is one row. Other arguments: as `small_batch_product` has them."""
    (outputs, depth), (rows, columns) = linear.weight.shape, tile
    found, tiles, eps = squares if squares is not None else (None, 0, 0.0)
    end, left = End(linear.bias, targets, found, eps, None, None, None), found
    if epilogue == ADD:
        assert norm is not None and residual is not None
        left = residual.squares
        end = end._replace(gamma=norm.weight, scaled=residual.scaled, squares_out=left)
    step = triton.next_power_of_2(max(tiles, 1))
    return end, Sizes(
        OUTPUTS=outputs // 2 if epilogue == GATED else outputs,
        DEPTH=depth,
        ROWS=rows,
        COLUMNS=columns,
        SQUARES=tiles,
        STRIDE=0 if left is None else left.shape[1],
        STEP=step if lone else max(1, min(step, _SQUARES_WORDS // columns)),
        EPILOGUE=epilogue,
        GELU=is_gelu_tanh(activation),
        LONE=lone,
    )


def columns_of(num_rows: int) -> int:
    """Return the columns of a tile that has all rows of the batch: a multiple that the matrix units take."""
    return max(1 << (num_rows - 1).bit_length(), LEAST_COLUMNS)


def small_batch_product(
    x: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    epilogue: int,
    tiling: Tiling,
    scratch: SplitScratch | None,
    num_rows: int,
    *,
    squares: Squares = None,
    norm: Norm | None = None,
    residual: Residual | None = None,
    targets: torch.Tensor | None = None,
    activation: Activation = "silu",
    chained: bool = True,
) -> None:
    """out (epilogue)= x @ weight.T + bias, for the first `num_rows` rows; rows past them are written by nobody.

    x: [num_rows or more, in], `in` a multiple of tiling.block * tiling.splits if there are several parts. linear:
    weight [out, in], twice as many rows if GATED. scratch: needed where the parts of the depth are spread over
    programs. squares: x is a `scaled` residual, whose sums of squares these are: float64 [tiles, num_rows or more], how
    many tiles, and the norm's eps. ADD: `out` is residual.values, and the rest of `residual` is made for `norm`.
    targets: int32 [num_rows], the row of `out` to which each row goes, with STORE; each to its own without it.
    activation: of the gate, if GATED. chained: parts are summed in chains (`chain_of`), if there are several.
    """
    depth, halves = linear.weight.shape[1], 2 if epilogue == GATED else 1
    columns = min(columns_of(num_rows), tiling.columns)
    end, sizes = end_of(
        linear, epilogue, (tiling.rows, columns), squares, norm, residual, activation, targets,
        lone=tiling.direct and num_rows == 1,
    )  # fmt: skip
    tiles_out, groups = ceil_div(sizes.OUTPUTS, tiling.rows), ceil_div(num_rows, columns)
    assert end.squares_out is None or tiles_out <= end.squares_out.shape[0]
    assert epilogue == STORE or targets is None
    spread = tiling.spread and tiling.splits > 1 and not tiling.direct
    chain = chain_of(depth, tiling.splits) if chained else 0
    assert not chain or (tiling.block % chain == 0 if tiling.direct else tiling.block == chain)
    # A part of one block would not be summed by itself: the compiler makes one instruction of a dot and a sum after it.
    assert spread or tiling.direct or tiling.splits == 1 or chain or depth // tiling.splits >= 2 * tiling.block
    assert depth % (tiling.splits * tiling.block) == 0 or (tiling.splits == 1 and not tiling.direct)
    if spread:
        assert scratch is not None and groups * tiles_out <= scratch.arrived.shape[0]
        assert groups * columns * tiles_out * tiling.rows * halves * tiling.splits <= SPLIT_WORDS
    options: dict[str, Any] = {
        "SIZES": sizes,
        "BLOCK": tiling.block,
        "DEPENDENT": tiling.dependent,
        "launch_pdl": tiling.dependent,
        "num_warps": tiling.warps,
        "enable_fp_fusion": False,
    }
    if tiling.direct:
        segment, tiles = depth // tiling.splits, tiling.warps // tiling.splits
        warp_outputs = tiling.rows * halves // tiles
        assert num_rows <= MOST_DIRECT and tiling.warps == tiles * tiling.splits and warp_outputs in WARP_OUTPUTS
        assert tiling.block % GRAIN == 0 and segment % tiling.block == 0
        warp_split_k_kernel[(tiles_out,)](
            x,
            linear.weight,
            out,
            end,
            num_rows,
            SEGMENTS=tiling.splits,
            TILES=tiles,
            PREFETCHED=blocks_prefetched(segment, tiling.block, warp_outputs),
            CHAIN=chain // GRAIN,
            **options,
        )
        return
    _rows_product_kernel[(groups, tiles_out, tiling.splits if spread else 1)](
        x,
        linear.weight,
        out,
        end,
        scratch if spread else None,
        num_rows,
        SPLITS=tiling.splits,
        SPREAD=spread,
        CHAINED=chain > 0,
        STAGES=tiling.stages,
        PREFETCHED=min(tiling.held, depth // (tiling.splits * tiling.block)),
        **options,
    )
