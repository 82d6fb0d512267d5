"""Products of few rows with an FP8 matrix for compute capability 9.0 with warp specialization: a producer warp issues
TMA copies of weights and rows block by block, and a group of four warps multiplies. The sums are the same as in
`fp8_gemm.py`, in the same order.

With few rows, memory bandwidth bounds the time. So a program has most of a multiprocessor's shared memory as a
ring of stages, and requests weights for all of them before it waits for the kernels before it. A stage is ready when
its bytes have arrived, and free when the computing group has released it. Written in Gluon, Triton's language for
explicit warps and layouts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)
# mypy: disable-error-code="assignment"
# (nor has a tuple that grows)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, Fp8Weight
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.rounding import ceil_div

LINES: Final = 64  # outputs of a program's tile, as the matrix units take them
REGISTERS: Final = 128  # of a thread: programs of small kernels before and behind fit beside a program
COPIER_REGISTERS: Final = 40
_LEAST_ROWS: Final = 8  # of the batch, as the matrix units take them
_RING: Final = 200 << 10  # bytes of shared memory for stages
_COLUMNS, _LINES = gl.constexpr(FP8_COLUMNS), gl.constexpr(LINES)
_COPIER_REGISTERS = gl.constexpr(COPIER_REGISTERS)


class _Sizes(NamedTuple):
    """Constants of a product with an FP8 matrix."""

    ROW_SCALES: int  # of 128 columns
    OUTPUTS: int
    TILES: int  # of outputs
    BLOCKS: int  # of the depth
    ALONG: int  # scales of blocks along the depth
    ROWS: int  # of the batch of a tile
    STAGES: int
    PIECES: int  # blocks of a stage
    AT_ONCE: int  # stages whose products are in flight together, 1 or 2
    HAS_BLOCKS: bool


@gluon.jit
def _copy(matrix, line, block, ready, ring, stage, PIECES: gl.constexpr):
    """Issue the copies of one stage of weights or rows: PIECES blocks of 128 columns."""
    for piece in gl.static_range(PIECES):
        to = ring.index(stage * PIECES + piece)
        tma.async_copy_global_to_shared(matrix, [line, (block + piece) * _COLUMNS], ready.index(stage), to)


@gluon.jit
def _copying_group(weights, rows, weight_ring, row_ring, ready, free, SIZES: gl.constexpr, DEPENDENT: gl.constexpr):
    """Copy the stages of every tile in the order of the computing group."""
    STAGES: gl.constexpr = SIZES.STAGES
    PIECES: gl.constexpr = SIZES.PIECES
    PARTS: gl.constexpr = SIZES.BLOCKS // PIECES
    BYTES: gl.constexpr = PIECES * _COLUMNS * (_LINES + SIZES.ROWS)
    program, programs = gl.program_id(0), gl.num_programs(0)
    parts = (SIZES.TILES - program + programs - 1) // programs * PARTS
    first = gl.minimum(parts, STAGES)
    for i in range(0, first):
        line = (program + i // PARTS * programs) * _LINES
        mbarrier.expect(ready.index(i), BYTES)
        _copy(weights, line, i % PARTS * PIECES, ready, weight_ring, i, PIECES)
    wait_for_predecessors(DEPENDENT)
    for i in range(0, first):
        _copy(rows, 0, i % PARTS * PIECES, ready, row_ring, i, PIECES)
    for i in range(first, parts):
        stage, block = i % STAGES, i % PARTS * PIECES
        line = (program + i // PARTS * programs) * _LINES
        mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)
        mbarrier.expect(ready.index(stage), BYTES)
        _copy(weights, line, block, ready, weight_ring, stage, PIECES)
        _copy(rows, 0, block, ready, row_ring, stage, PIECES)


@gluon.jit
def _computing_group(
    weight_ring, row_ring, ready, free, scales, block_scales, out, num_rows, SIZES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Compute the tiles. AT_ONCE: stages whose products begin before the first one's are added."""
    STAGES: gl.constexpr = SIZES.STAGES
    ROWS: gl.constexpr = SIZES.ROWS
    ROW_SCALES: gl.constexpr = SIZES.ROW_SCALES
    PIECES: gl.constexpr = SIZES.PIECES
    AT_ONCE: gl.constexpr = SIZES.AT_ONCE
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    FLAT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    nothing = gl.zeros([_LINES, ROWS], gl.float32, SUMS)
    program, programs = gl.program_id(0), gl.num_programs(0)
    wait_for_predecessors(DEPENDENT)
    done = 0
    for tile in range(program, SIZES.TILES, programs):
        line = tile * _LINES
        of_blocks = block_scales + line // _COLUMNS * SIZES.ALONG
        acc = gl.zeros([_LINES, ROWS], gl.float32, SUMS)
        for first in range(0, SIZES.BLOCKS, AT_ONCE * PIECES):
            products, by = (), ()
            for nth in gl.static_range(AT_ONCE):
                stage, block = (done + nth) % STAGES, first + nth * PIECES
                for piece in gl.static_range(PIECES):
                    of_row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
                    at = scales + (block + piece) * ROW_SCALES + of_row
                    if ROWS > ROW_SCALES:
                        found = gl.load(at, mask=of_row < ROW_SCALES, other=0.0)
                    else:
                        found = gl.load(at)
                    if SIZES.HAS_BLOCKS:
                        found = found * gl.load(of_blocks + block + piece)
                    by = by + (gl.expand_dims(found, 0).broadcast_to([_LINES, ROWS]),)  # noqa: RUF005
                mbarrier.wait(ready.index(stage), (done + nth) // STAGES & 1)
                for piece in gl.static_range(PIECES):
                    weights = weight_ring.index(stage * PIECES + piece)
                    x = row_ring.index(stage * PIECES + piece).permute((1, 0))
                    made = warpgroup_mma(weights, x, nothing, use_acc=False, is_async=True)
                    products = products + (made,)  # noqa: RUF005
            for n in gl.static_range(AT_ONCE * PIECES):
                made = warpgroup_mma_wait(AT_ONCE * PIECES - 1 - n, deps=[products[n]])
                if n % PIECES == PIECES - 1:
                    mbarrier.arrive(free.index((done + n // PIECES) % STAGES), count=1)
                acc = gl.fma(made, by[n], acc)
            done += AT_ONCE
        output = line + gl.arange(0, _LINES, gl.SliceLayout(1, FLAT))
        row = gl.arange(0, ROWS, gl.SliceLayout(0, FLAT))
        sums = gl.convert_layout(acc.to(out.dtype.element_ty), FLAT)
        ok = (output < SIZES.OUTPUTS)[:, None] & (row < num_rows)[None, :]
        gl.store(out + row[None, :] * SIZES.OUTPUTS + output[:, None], sums, mask=ok)


@gluon.jit(do_not_specialize=["num_rows"])
def fp8_groups_kernel(weights, rows, scales, block_scales, out, num_rows, SIZES: gl.constexpr, DEPENDENT: gl.constexpr):
    """Compute tiles of 64 outputs and all rows of the batch, several in each of the persistent programs."""
    let_dependents_start(DEPENDENT)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    MARK: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = SIZES.STAGES
    weight_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * SIZES.PIECES, _LINES, _COLUMNS], BLOCK)
    row_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * SIZES.PIECES, SIZES.ROWS, _COLUMNS], BLOCK)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _computing_group,
                (weight_ring, row_ring, ready, free, scales, block_scales, out, num_rows, SIZES, DEPENDENT),
            ),
            (_copying_group, (weights, rows, weight_ring, row_ring, ready, free, SIZES, DEPENDENT)),
        ],
        [1],
        [_COPIER_REGISTERS],
    )  # fmt: skip


def _ring_of(num_rows: int, blocks: int) -> tuple[int, int, int]:
    """Choose rows of the batch of a tile, blocks of a stage, and stages. blocks: of the depth."""
    rows = max(_LEAST_ROWS, triton.next_power_of_2(num_rows))
    pieces = 4 if blocks % 4 == 0 and rows <= 16 else 2 if blocks % 2 == 0 and rows <= 32 else 1
    return rows, pieces, _RING // (pieces * FP8_COLUMNS * (LINES + rows))


def fp8_group_product(
    x: Fp8Rows, weight: Fp8Weight, out: torch.Tensor, num_rows: int, dependent: bool, processors: int, stages: int = 0
) -> None:
    """out = the rounded accumulators of x @ weight.T. out: bfloat16 [num_rows or more, outputs], contiguous. dependent:
    launched programmatically. processors: most programs. stages: 0: all that fit."""
    outputs, depth = weight.shape
    blocks, tiles = depth // FP8_COLUMNS, ceil_div(outputs, LINES)
    rows, pieces, fitting = _ring_of(num_rows, blocks)
    layout = gl.NVMMASharedLayout(128, 8, 2)
    fp8_groups_kernel[(min(tiles, processors),)](
        TensorDescriptor(weight.numbers, [outputs, depth], [depth, 1], [LINES, FP8_COLUMNS], layout),
        TensorDescriptor(x.numbers, [len(x), depth], [depth, 1], [rows, FP8_COLUMNS], layout),
        x.scales,
        weight.blocks,
        out,
        num_rows,
        SIZES=_Sizes(
            len(x),
            outputs,
            tiles,
            blocks,
            ALONG=weight.blocks.shape[1],
            ROWS=rows,
            STAGES=stages or fitting,
            PIECES=pieces,
            AT_ONCE=2 if blocks // pieces % 2 == 0 else 1,
            HAS_BLOCKS=weight.channels is None,
        ),
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=4,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
    )
