"""A row's line of the block table in kernels: int32 block numbers, in the order of positions."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

_TILE = tl.constexpr(256)


@triton.jit
def kv_slots(line, position, known, BLOCK_SIZE: tl.constexpr):
    """Return the KV slots of a row's positions, int64; in the null block for positions that are not `known`."""
    block = tl.load(line + position // BLOCK_SIZE, mask=known, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def copy_blocks(line, target, count, BLOCKS: tl.constexpr):
    """Copy a line's first `count` blocks, and up to the end of the last tile more, at most BLOCKS."""
    for first in range(0, count, _TILE):
        j = first + tl.arange(0, _TILE)
        tl.store(target + j, tl.load(line + j, mask=j < BLOCKS, other=0), mask=j < BLOCKS)
