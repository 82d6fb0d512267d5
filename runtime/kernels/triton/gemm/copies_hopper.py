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
def tile_at(tile, row_tiles, TILES: gl.constexpr):
    """Return the tile's row and column of tiles. Programs that run at a time have tiles of _ACROSS strips of rows, so
    that they reuse data of the L2 cache.
    """
    first = tile // (_ACROSS_STRIPS * TILES) * _ACROSS_STRIPS
    across = gl.minimum(row_tiles - first, _ACROSS_STRIPS)
    within = tile % (_ACROSS_STRIPS * TILES)
    return first + within % across, within // across


@gluon.jit
def _depth_at(step, group, DEPTH: gl.constexpr, SEGMENTS: gl.constexpr, SPLIT: gl.constexpr):
    """Where a group's step begins. SPLIT: each group has every second segment."""
    SEGMENT_STEPS: gl.constexpr = DEPTH // SEGMENTS // _STEP
    at = step * _STEP
    if SPLIT:
        at = (step // SEGMENT_STEPS * 2 + group) * SEGMENT_STEPS * _STEP + step % SEGMENT_STEPS * _STEP
    return at


@gluon.jit
def _copy_piece(
    weight, ring, ready, stage, index, output, at, OUTPUTS: gl.constexpr, HALVES: gl.constexpr, BOX: gl.constexpr
):
    """Issue the copies of the weights of one matrix instruction. index: in the ring. output: the first one. Returns the
    next."""
    BOXES: gl.constexpr = ring.shape[1] // BOX
    EACH: gl.constexpr = BOXES // HALVES
    boxes = ring._reinterpret(weight.dtype, [ring.shape[0] * BOXES, BOX, _STEP], weight.layout)
    for box in gl.static_range(BOXES):
        line = output + box % EACH * BOX + box // EACH * OUTPUTS
        tma.async_copy_global_to_shared(weight, [line, at], ready.index(stage), boxes.index(index * BOXES + box))
    return output + EACH * BOX


@gluon.jit
def _copy_weights(
    weight, rings, ready, stage, tile, step, DEPTH: gl.constexpr, SEGMENTS: gl.constexpr, OUTPUTS: gl.constexpr,
    WIDTH: gl.constexpr, HALVES: gl.constexpr, BOX: gl.constexpr, SPLIT: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Issue the copies of one stage of weights, and announce the stage's BYTES."""
    COPIES: gl.constexpr = 2 if SPLIT else 1
    mbarrier.expect(ready.index(stage), BYTES)
    for group in gl.static_range(COPIES):
        at = _depth_at(step, group, DEPTH, SEGMENTS, SPLIT)
        output = tile * WIDTH
        for piece in gl.static_range(len(rings)):
            output = _copy_piece(
                weight, rings[piece], ready, stage, stage * COPIES + group, output, at, OUTPUTS, HALVES, BOX
            )


@gluon.jit
def _copy_rows(x, row_ring, ready, stage, tile, step, DEPTH: gl.constexpr, SEGMENTS: gl.constexpr, SPLIT: gl.constexpr):
    """Issue the copies of one stage of rows."""
    for group in gl.static_range(2):
        row = tile * _ROWS if SPLIT else (tile * 2 + group) * _ROWS
        at = _depth_at(step, group, DEPTH, SEGMENTS, SPLIT)
        tma.async_copy_global_to_shared(x, [row, at], ready.index(stage), row_ring.index(stage * 2 + group))


@gluon.jit
def copying_warp(
    x, weight, ring, row_tiles, TILES: gl.constexpr, DEPTH: gl.constexpr,
    SEGMENTS: gl.constexpr, OUTPUTS: gl.constexpr, WIDTH: gl.constexpr, HALVES: gl.constexpr, BOX: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Copy the tiles' rows and weights, STEP of the depth at a time, as ring stages become free; the first weights
    before it waits for the kernels before. SPLIT: the two groups have the same rows and outputs."""
    STEPS: gl.constexpr = DEPTH // _STEP // (2 if SPLIT else 1)
    FIRST: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = (2 * _ROWS + WIDTH * HALVES * (2 if SPLIT else 1)) * _STEP * 2
    row_ring, rings, ready, free = ring
    program, programs = gl.program_id(0), gl.num_programs(0)
    rows, outputs = tile_at(program, row_tiles, TILES)
    for stage in range(FIRST):
        _copy_weights(
            weight, rings, ready, stage, outputs, stage, DEPTH, SEGMENTS, OUTPUTS, WIDTH, HALVES, BOX, SPLIT, BYTES
        )
    wait_for_predecessors(DEPENDENT)
    for stage in range(FIRST):
        _copy_rows(x, row_ring, ready, stage, rows, stage, DEPTH, SEGMENTS, SPLIT)
    tiles = (row_tiles * TILES - program + programs - 1) // programs
    for i in range(FIRST, tiles * STEPS):
        stage, step = i % STAGES, i % STEPS
        rows, outputs = tile_at(program + i // STEPS * programs, row_tiles, TILES)
        mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)
        _copy_weights(
            weight, rings, ready, stage, outputs, step, DEPTH, SEGMENTS, OUTPUTS, WIDTH, HALVES, BOX, SPLIT, BYTES
        )
        _copy_rows(x, row_ring, ready, stage, rows, step, DEPTH, SEGMENTS, SPLIT)
