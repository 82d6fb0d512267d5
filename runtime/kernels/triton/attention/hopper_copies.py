"""The producer warps of `attention/prefill_hopper.py`, which issue TMA copies of keys and values block by block."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runahead.runtime.kernels.triton.attention.prefill_schedule import item_of, seen_of

HALF: Final = 64  # elements in one 128-byte line of swizzled shared memory

_HALF = gl.constexpr(HALF)


class Sizes(NamedTuple):
    """Constants of prefill attention by groups of warps."""

    Q_HEADS: int
    KV_HEADS: int
    DIM: int  # of a head
    BLOCK_SIZE: int
    WINDOW: int
    TOKENS: int  # query tokens of a tile
    KEYS: int  # tokens of a KV tile
    PIECE: int  # tokens of one copy
    STAGES: int


@gluon.jit
def _copy_tile(descriptor, ring, ready, stage, column, rows, SIZES: gl.constexpr):
    """Issue the copies of one tile of keys or values: one for each PIECE tokens of a block and half of a head. Shared
    memory has all lines of the first half, then all of the second, as the matrix units expect.
    """
    HALVES: gl.constexpr = SIZES.DIM // _HALF
    PIECES: gl.constexpr = SIZES.KEYS // SIZES.PIECE
    pieces = ring._reinterpret(ring.dtype, [SIZES.STAGES * HALVES * PIECES, SIZES.PIECE, _HALF], descriptor.layout)
    for half in gl.static_range(HALVES):
        for piece in gl.static_range(PIECES):
            to = pieces.index((stage * HALVES + half) * PIECES + piece)
            tma.async_copy_global_to_shared(descriptor, [rows[piece], column + half * _HALF], ready, to)


@gluon.jit
def copying_group(
    keys, values, key_ring, value_ring, keys_ready, values_ready, keys_free, values_free, block_tables, table_stride,
    nowhere, seq_lens, query_start_loc, items, total, SIZES: gl.constexpr,
):  # fmt: skip
    """Copy every tile of keys and values for the computing groups, in their order, as ring stages become free."""
    BLOCK_SIZE: gl.constexpr = SIZES.BLOCK_SIZE
    KEYS: gl.constexpr = SIZES.KEYS
    all_items = gl.load(total) * SIZES.KV_HEADS
    programs = gl.num_programs(0)
    brought = 0
    for turn in range(0, (all_items + programs - 1) // programs):
        there, row, tile, kv_head = item_of(turn, items, all_items, SIZES.KV_HEADS)
        _, _, _, last, begin, end, _, _ = seen_of(
            there, row, tile, seq_lens, query_start_loc, SIZES.TOKENS, KEYS, SIZES.WINDOW
        )
        table = block_tables + row.to(gl.int64) * table_stride
        for first in range(begin, end, KEYS):
            # Look up blocks before the wait for a stage. Beyond the last token no block number is read: an index
            # outside the tensor makes the engine write zeros.
            rows = ()
            for piece in gl.static_range(KEYS // SIZES.PIECE):
                token = first + piece * SIZES.PIECE
                block = gl.load(table + token // BLOCK_SIZE, mask=token < last, other=nowhere)
                rows = rows + (block * BLOCK_SIZE + token % BLOCK_SIZE,)  # type: ignore[assignment] # noqa: RUF005
            stage, phase = brought % SIZES.STAGES, brought // SIZES.STAGES & 1
            mbarrier.wait(keys_free.index(stage), phase ^ 1)
            mbarrier.expect(keys_ready.index(stage), KEYS * SIZES.DIM * 2)
            _copy_tile(keys, key_ring, keys_ready.index(stage), stage, kv_head * SIZES.DIM, rows, SIZES)
            mbarrier.wait(values_free.index(stage), phase ^ 1)
            mbarrier.expect(values_ready.index(stage), KEYS * SIZES.DIM * 2)
            _copy_tile(values, value_ring, values_ready.index(stage), stage, kv_head * SIZES.DIM, rows, SIZES)
            brought += 1


def piece_of(keys: int, block_size: int) -> int:
    """Return the tokens of one copy, for tiles of `keys` tokens. The swizzle needs at least 8, and no block is
    smaller.
    """
    return min(keys, block_size)


def lines_of(cache: torch.Tensor, piece: int) -> TensorDescriptor:
    """Describe keys or values for TMA: lines of tokens, `piece` tokens and half a head at a time.

    cache: contiguous [num_blocks, block_size, kv_heads, D], 16 bits, D a multiple of 64.
    """
    assert cache.is_contiguous()
    blocks, block_size, kv_heads, head_dim = cache.shape
    width = kv_heads * head_dim
    shape, strides = [blocks * block_size, width], [width, 1]
    return TensorDescriptor(cache, shape, strides, [piece, HALF], gl.NVMMASharedLayout(128, 16, 2))
