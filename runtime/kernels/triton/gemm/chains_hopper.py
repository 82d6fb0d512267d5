"""Products of more than 64 rows in segments and chains (`segments`, `chain_of`) for compute capability 9.0, with warp
specialization: one producer warp issues TMA copies of the rows and the weights, and two consumer groups compute. While
a group adds a chain to its sums, the matrix units compute the other group's chain.

The groups divide a tile's rows or, where all tiles run at a time, its segments. The bits are those of
`small_batch_gemm.py`. Written in Gluon, Triton's language for explicit warps and layouts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
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

from runahead.runtime.rounding import ceil_div

ROWS: Final = 64  # of a consumer group's part of a tile
STEP: Final = 64  # of the depth: one 128-byte line of swizzled shared memory
REGISTERS: Final = 240  # of a consumer thread; the rest is for the producer
PRODUCER_REGISTERS: Final = 24

_RING_BYTES: Final = 192 << 10
_ACROSS: Final = 8  # strips of rows of tiles that run at a time

_ROWS, _STEP = gl.constexpr(ROWS), gl.constexpr(STEP)
_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(REGISTERS), gl.constexpr(PRODUCER_REGISTERS)


@gluon.jit
def _tile_of(tile, row_tiles, TILES: gl.constexpr, ACROSS: gl.constexpr):
    """Return the tile's row and column of tiles. Programs that run at a time have tiles of ACROSS strips of rows, so
    that they reuse data of the L2 cache.
    """
    first = tile // (ACROSS * TILES) * ACROSS
    across = gl.minimum(row_tiles - first, ACROSS)
    within = tile % (ACROSS * TILES)
    return first + within % across, within // across


@gluon.jit
def _copying_warp(
    x, weight, row_ring, weight_ring, ready, free, row_tiles, TILES: gl.constexpr, ACROSS: gl.constexpr,
    DEPTH: gl.constexpr, SEGMENTS: gl.constexpr, OUTPUTS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles' rows and weights, STEP of the depth at a time, as ring stages become free. SPLIT: the two groups
    have the same rows and outputs, and every second segment each.
    """
    SEGMENT: gl.constexpr = DEPTH // SEGMENTS
    EACH: gl.constexpr = SEGMENTS // 2 if SPLIT else SEGMENTS
    WEIGHTS: gl.constexpr = 2 if SPLIT else 1
    brought = 0
    for tile in range(gl.program_id(0), row_tiles * TILES, gl.num_programs(0)):
        rows, outputs = _tile_of(tile, row_tiles, TILES, ACROSS)
        for segment in range(EACH):
            for k in range(0, SEGMENT, _STEP):
                stage, phase = brought % STAGES, brought // STAGES & 1
                mbarrier.wait(free.index(stage), phase ^ 1)
                coming = ready.index(stage)
                mbarrier.expect(coming, (2 * _ROWS + WEIGHTS * OUTPUTS) * _STEP * 2)
                for half in gl.static_range(2):
                    to = row_ring.index(stage * 2 + half)
                    if SPLIT:
                        at = (segment * 2 + half) * SEGMENT + k
                        tma.async_copy_global_to_shared(x, [rows * _ROWS, at], coming, to)
                        to = weight_ring.index(stage * 2 + half)
                        tma.async_copy_global_to_shared(weight, [outputs * OUTPUTS, at], coming, to)
                    else:
                        at = segment * SEGMENT + k
                        tma.async_copy_global_to_shared(x, [(rows * 2 + half) * _ROWS, at], coming, to)
                if not SPLIT:
                    to = weight_ring.index(stage)
                    tma.async_copy_global_to_shared(weight, [outputs * OUTPUTS, segment * SEGMENT + k], coming, to)
                brought += 1


@gluon.jit
def _segment(
    row_ring, weight_ring, ready, free, order, done, GROUP_OF: gl.constexpr, CHAINS: gl.constexpr, CHAIN: gl.constexpr,
    OUTPUTS: gl.constexpr, SPLIT: gl.constexpr, PACED: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return the sums of the group's next segment. done: steps so far, which give a ring's stage and phase. PACED: the
    groups issue their chains alternately.
    """
    sums = gl.zeros([_ROWS, OUTPUTS], gl.float32, SUMS)
    for _ in range(CHAINS):
        if PACED:  # the first group does not wait for its first chain
            mbarrier.wait(order.index(GROUP_OF), done // CHAIN & 1 ^ (1 - GROUP_OF))
        chain = gl.zeros([_ROWS, OUTPUTS], gl.float32, SUMS)
        for step in gl.static_range(CHAIN):
            stage, phase = (done + step) % STAGES, (done + step) // STAGES & 1
            mbarrier.wait(ready.index(stage), phase)
            weights = weight_ring.index(stage * 2 + GROUP_OF if SPLIT else stage)
            chain = warpgroup_mma(
                row_ring.index(stage * 2 + GROUP_OF), weights.permute((1, 0)), chain, use_acc=step > 0, is_async=True
            )
        if PACED:
            mbarrier.arrive(order.index(1 - GROUP_OF), count=1)
        for step in gl.static_range(CHAIN):
            chain = warpgroup_mma_wait(CHAIN - 1 - step, deps=[chain])
            mbarrier.arrive(free.index((done + step) % STAGES), count=1)
        sums += chain
        done += CHAIN
    return sums, done


@gluon.jit
def _store_tile(out, left, total, row, output):
    """Store a group's part of a tile behind the one before."""
    tma.store_wait(0)
    left.store(total.to(left.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, output], left)


@gluon.jit
def _group_of_rows(
    out, row_ring, weight_ring, ready, free, order, left, row_tiles, GROUP_OF: gl.constexpr, TILES: gl.constexpr,
    ACROSS: gl.constexpr, SEGMENTS: gl.constexpr, CHAINS: gl.constexpr, CHAIN: gl.constexpr,
    OUTPUTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute half of the rows of the tiles in order. GROUP_OF: 0 or 1, the group's index. CHAINS: of a segment. CHAIN:
    steps of a chain.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    PACED: gl.constexpr = OUTPUTS > 64  # measured
    done = 0
    for tile in range(gl.program_id(0), row_tiles * TILES, gl.num_programs(0)):
        rows, outputs = _tile_of(tile, row_tiles, TILES, ACROSS)
        total = gl.zeros([_ROWS, OUTPUTS], gl.float32, SUMS)
        for _ in range(SEGMENTS):
            sums, done = _segment(
                row_ring, weight_ring, ready, free, order, done, GROUP_OF, CHAINS, CHAIN, OUTPUTS, False, PACED, STAGES,
                SUMS,
            )  # fmt: skip
            total += sums
        _store_tile(out, left.index(GROUP_OF), total, (rows * 2 + GROUP_OF) * _ROWS, outputs * OUTPUTS)
    tma.store_wait(0)


@gluon.jit
def _group_of_segments(
    out, row_ring, weight_ring, ready, free, order, totals, left, row_tiles, GROUP_OF: gl.constexpr,
    TILES: gl.constexpr, ACROSS: gl.constexpr, SEGMENTS: gl.constexpr, CHAINS: gl.constexpr, CHAIN: gl.constexpr,
    OUTPUTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute every second segment of the tiles in order, and add it to the segments before, which the other group has
    left in `totals`. Arguments: see `_group_of_rows`.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    done = 0
    added = 0
    for tile in range(gl.program_id(0), row_tiles * TILES, gl.num_programs(0)):
        rows, outputs = _tile_of(tile, row_tiles, TILES, ACROSS)
        for segment in range(SEGMENTS // 2):
            sums, done = _segment(
                row_ring, weight_ring, ready, free, order, done, GROUP_OF, CHAINS, CHAIN, OUTPUTS, True, False, STAGES,
                SUMS,
            )  # fmt: skip
            mbarrier.wait(order.index(GROUP_OF), added & 1 ^ (1 - GROUP_OF))
            added += 1
            total = totals.load(SUMS) + sums
            is_last = GROUP_OF == 1 and segment == SEGMENTS // 2 - 1
            totals.store(gl.where(is_last, 0.0, total))
            mbarrier.arrive(order.index(1 - GROUP_OF), count=1)
            if is_last:
                _store_tile(out, left.index(0), total, rows * _ROWS, outputs * OUTPUTS)
    tma.store_wait(0)


@gluon.jit
def _computing_group(
    out, row_ring, weight_ring, ready, free, order, totals, left, row_tiles, GROUP_OF: gl.constexpr,
    TILES: gl.constexpr, ACROSS: gl.constexpr, SEGMENTS: gl.constexpr, CHAINS: gl.constexpr, CHAIN: gl.constexpr,
    OUTPUTS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute a group's part of the tiles."""
    if SPLIT:
        _group_of_segments(
            out, row_ring, weight_ring, ready, free, order, totals, left, row_tiles, GROUP_OF, TILES, ACROSS, SEGMENTS,
            CHAINS, CHAIN, OUTPUTS, STAGES,
        )  # fmt: skip
    else:
        _group_of_rows(
            out, row_ring, weight_ring, ready, free, order, left, row_tiles, GROUP_OF, TILES, ACROSS, SEGMENTS, CHAINS,
            CHAIN, OUTPUTS, STAGES,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def chains_kernel(
    x, weight, out, num_rows, TILES: gl.constexpr, ACROSS: gl.constexpr, DEPTH: gl.constexpr, SEGMENTS: gl.constexpr,
    CHAIN: gl.constexpr, OUTPUTS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute tiles of 128 rows, 64 if SPLIT, and OUTPUTS outputs. SPLIT: the groups divide the segments. A ring
    stage is ready when its bytes have arrived, and free when both consumer groups have released it.
    """
    CHAINS: gl.constexpr = DEPTH // (SEGMENTS * CHAIN * _STEP)
    PARTS: gl.constexpr = 2 if SPLIT else 1
    HEIGHT: gl.constexpr = 2 * _ROWS // PARTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    MARK: gl.constexpr = mbarrier.MBarrierLayout()
    row_ring = gl.allocate_shared_memory(x.dtype, [STAGES * 2, _ROWS, _STEP], x.layout)
    weight_ring = gl.allocate_shared_memory(x.dtype, [STAGES * PARTS, OUTPUTS, _STEP], weight.layout)
    left = gl.allocate_shared_memory(out.dtype, [2 // PARTS, _ROWS, OUTPUTS], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], MARK)
    mbarrier.init(order.index(0), count=1)
    mbarrier.init(order.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    totals = left
    if SPLIT:
        totals = gl.allocate_shared_memory(gl.float32, [_ROWS, OUTPUTS], gl.NVMMASharedLayout(128, 32, 2))
        totals.store(gl.zeros([_ROWS, OUTPUTS], gl.float32, SUMS))
    fence_async_shared()
    row_tiles = (num_rows + HEIGHT - 1) // HEIGHT
    gl.warp_specialize(
        [
            (
                _computing_group,
                (
                    out, row_ring, weight_ring, ready, free, order, totals, left, row_tiles, 0, TILES, ACROSS, SEGMENTS,
                    CHAINS, CHAIN, OUTPUTS, SPLIT, STAGES,
                ),
            ),
            (
                _computing_group,
                (
                    out, row_ring, weight_ring, ready, free, order, totals, left, row_tiles, 1, TILES, ACROSS, SEGMENTS,
                    CHAINS, CHAIN, OUTPUTS, SPLIT, STAGES,
                ),
            ),
            (
                _copying_warp,
                (
                    x, weight, row_ring, weight_ring, ready, free, row_tiles, TILES, ACROSS, DEPTH, SEGMENTS, OUTPUTS,
                    SPLIT, STAGES,
                ),
            ),
        ],
        [4, 1],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def chains_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, splits: int, chain: int) -> None:
    """out = x @ weight.T in `splits` segments, of which each is summed in chains of `chain`.

    x: bfloat16 [T, in], `in` a multiple of splits * chain. weight: bfloat16 [outputs, in], outputs a multiple of 8.
    out: bfloat16 [T, outputs]. All are contiguous. splits: a power of two above 1. chain: 64 or 128.
    """
    rows, depth = x.shape
    width = weight.shape[0]
    assert out.shape == (rows, width) and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    assert splits % 2 == 0 and chain in (STEP, 2 * STEP) and depth % (splits * chain) == 0
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    outputs, split = tile_of(rows, width, programs)
    tiles = ceil_div(width, outputs)
    layout, result = (gl.NVMMASharedLayout(min(128, 2 * entries), 16, 2) for entries in (STEP, outputs))
    chains_kernel[(min(programs, ceil_div(rows, ROWS if split else 2 * ROWS) * tiles),)](
        TensorDescriptor(x, [rows, depth], [depth, 1], [ROWS, STEP], layout),
        TensorDescriptor(weight, [width, depth], [depth, 1], [outputs, STEP], layout),
        TensorDescriptor(out, [rows, width], [width, 1], [ROWS, outputs], result),
        rows,
        TILES=tiles,
        ACROSS=_ACROSS,
        DEPTH=depth,
        SEGMENTS=splits,
        CHAIN=chain // STEP,
        OUTPUTS=outputs,
        SPLIT=split,
        STAGES=_RING_BYTES // (2 * STEP * (2 * ROWS + outputs * (2 if split else 1))),
        num_warps=4,
    )


def tile_of(rows: int, width: int, programs: int) -> tuple[int, bool]:
    """Return a tile's outputs, and whether its groups divide the segments: the smallest tiles that all run at a time,
    else the largest. No bit depends on it.
    """
    strips, halves = ceil_div(width, 64), ceil_div(rows, ROWS)
    if halves * strips <= programs:
        return 64, True
    return (64, False) if ceil_div(halves, 2) * strips <= programs else (128, False)
