"""The producer warp of `chains_hopper.py`, which issues TMA copies of the rows and the weights, and the order of its
tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from runahead.runtime.kernels.triton.gemm.end_hopper import ROWS
from runahead.runtime.kernels.triton.gpu.pdl import wait_for_predecessors

STEP: Final = 64  # of the depth: one 128-byte line of swizzled shared memory
_ACROSS: Final = 8  # strips of rows of tiles that run at a time

_ROWS, _STEP, _ACROSS_STRIPS = gl.constexpr(ROWS), gl.constexpr(STEP), gl.constexpr(_ACROSS)


@gluon.jit
def tile_at(tile, row_tiles, SIZES: gl.constexpr):
    """Return the tile's row and column of tiles. Programs that run at a time have tiles of _ACROSS strips of rows, so
    that they reuse data of the L2 cache.
    """
    first = tile // (_ACROSS_STRIPS * SIZES.TILES) * _ACROSS_STRIPS
    across = gl.minimum(row_tiles - first, _ACROSS_STRIPS)
    within = tile % (_ACROSS_STRIPS * SIZES.TILES)
    return first + within % across, within // across


@gluon.jit
def _depth_at(step, group, SIZES: gl.constexpr):
    """Return the column at which a group's step begins. SPLIT: each group has every second segment."""
    SEGMENT_STEPS: gl.constexpr = SIZES.DEPTH // SIZES.SEGMENTS // _STEP
    at = step * _STEP
    if SIZES.SPLIT:
        at = (step // SEGMENT_STEPS * 2 + group) * SEGMENT_STEPS * _STEP + step % SEGMENT_STEPS * _STEP
    return at


@gluon.jit
def _copy_piece(weight, ring, ready, stage, index, output, at, SIZES: gl.constexpr):
    """Issue the copies of the weights of one matrix instruction. index: in the ring. output: the first one. Returns the
    next."""
    BOXES: gl.constexpr = ring.shape[1] // SIZES.BOX
    EACH: gl.constexpr = BOXES // SIZES.HALVES
    boxes = ring._reinterpret(weight.dtype, [ring.shape[0] * BOXES, SIZES.BOX, _STEP], weight.layout)
    for box in gl.static_range(BOXES):
        line = output + box % EACH * SIZES.BOX + box // EACH * SIZES.OUTPUTS
        tma.async_copy_global_to_shared(weight, [line, at], ready.index(stage), boxes.index(index * BOXES + box))
    return output + EACH * SIZES.BOX


@gluon.jit
def _copy_weights(weight, rings, ready, stage, tile, step, SIZES: gl.constexpr):
    """Issue the copies of one stage of weights, and announce the stage's bytes."""
    COPIES: gl.constexpr = 2 if SIZES.SPLIT else 1
    mbarrier.expect(ready.index(stage), (2 * _ROWS + SIZES.WIDTH * SIZES.HALVES * COPIES) * _STEP * 2)
    for group in gl.static_range(COPIES):
        at = _depth_at(step, group, SIZES)
        output = tile * SIZES.WIDTH
        for piece in gl.static_range(len(rings)):
            output = _copy_piece(weight, rings[piece], ready, stage, stage * COPIES + group, output, at, SIZES)


@gluon.jit
def _copy_rows(x, row_ring, ready, stage, tile, step, SIZES: gl.constexpr):
    """Issue the copies of one stage of rows."""
    for group in gl.static_range(2):
        row = tile * _ROWS if SIZES.SPLIT else (tile * 2 + group) * _ROWS
        at = _depth_at(step, group, SIZES)
        tma.async_copy_global_to_shared(x, [row, at], ready.index(stage), row_ring.index(stage * 2 + group))


@gluon.jit
def copying_warp(x, weight, ring, row_tiles, SIZES: gl.constexpr, DEPENDENT: gl.constexpr):
    """Copy the tiles' rows and weights, STEP of the depth at a time, as ring stages become free; the first weights
    before it waits for the kernels before. SPLIT: the two groups have the same rows and outputs."""
    STAGES: gl.constexpr = SIZES.STAGES
    STEPS: gl.constexpr = SIZES.DEPTH // _STEP // (2 if SIZES.SPLIT else 1)
    FIRST: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    row_ring, rings, ready, free = ring
    program, programs = gl.program_id(0), gl.num_programs(0)
    rows, outputs = tile_at(program, row_tiles, SIZES)
    for stage in range(FIRST):
        _copy_weights(weight, rings, ready, stage, outputs, stage, SIZES)
    wait_for_predecessors(DEPENDENT)
    for stage in range(FIRST):
        _copy_rows(x, row_ring, ready, stage, rows, stage, SIZES)
    tiles = (row_tiles * SIZES.TILES - program + programs - 1) // programs
    for i in range(FIRST, tiles * STEPS):
        stage, step = i % STAGES, i % STEPS
        rows, outputs = tile_at(program + i // STEPS * programs, row_tiles, SIZES)
        mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)
        _copy_weights(weight, rings, ready, stage, outputs, step, SIZES)
        _copy_rows(x, row_ring, ready, stage, rows, step, SIZES)
