"""Prefill attention for compute capability 9.0 with warp specialization: one producer group issues TMA copies of keys
and values block by block, and two consumer groups compute 64 lines of the tile each. A consumer group computes the next
scores on the matrix units during the softmax of the last ones, beside the other group's products.

Items, lines and KV tiles are the same as in `prefill_attention`. Source: FlashAttention-3 (Shah et al., 2024),
forward: producer and consumers, and scores one tile ahead. Written in Gluon, Triton's language for explicit warps and
layouts.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.attention.hopper_copies import (
    HALF,
    Sizes,
    copying_group,
    lines_of,
    piece_of,
)
from runahead.runtime.kernels.triton.attention.prefill_schedule import ChunkWork, item_of, seen_of
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan
from runahead.runtime.kernels.triton.attention.query_tokens import softmax_step

HEAD_DIMS: Final = (64, 128)
LINES: Final = 64  # of a consumer group
REGISTERS: Final = 240  # of a consumer thread; producer threads share the remaining registers
COPIERS_REGISTERS: Final = 24

_HALF, _LINES = gl.constexpr(HALF), gl.constexpr(LINES)
_REGISTERS, _COPIERS_REGISTERS = gl.constexpr(REGISTERS), gl.constexpr(COPIERS_REGISTERS)


@gluon.jit
def _weights_of(
    score, first, last, position, scale, top, mass, MASKED: gl.constexpr, LAYOUT: gl.constexpr, SIZES: gl.constexpr
):
    """Return `softmax_step` of a tile's visible scores, [LINES, KEYS]."""
    if MASKED:
        token = first + gl.arange(0, SIZES.KEYS, gl.SliceLayout(0, LAYOUT))
        seen = (token[None, :] <= position[:, None]) & (token < last)[None, :]
        if SIZES.WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - SIZES.WINDOW)
        score = gl.where(seen, score, float("-inf"))
    return softmax_step(score, scale, top, mass, MASKED)


@gluon.jit
def _clear_behind(value_ring, stage, left, SIZES: gl.constexpr):
    """Zero values behind a tile's first `left` tokens within their piece: unused cells of a block may hold NaN, and 0
    times NaN is NaN. Both consumer groups write the same.
    """
    PIECE: gl.constexpr = SIZES.PIECE
    if (left < SIZES.KEYS) & (left % PIECE != 0):
        HALVES: gl.constexpr = SIZES.DIM // _HALF
        PIECES: gl.constexpr = SIZES.KEYS // PIECE
        FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        pieces = value_ring._reinterpret(
            value_ring.dtype, [SIZES.STAGES * HALVES * PIECES, PIECE, _HALF], gl.NVMMASharedLayout(128, 16, 2)
        )
        token = gl.arange(0, PIECE, gl.SliceLayout(1, FLAT))
        for half in gl.static_range(HALVES):
            piece = pieces.index((stage * HALVES + half) * PIECES + left // PIECE)
            value = piece.load(FLAT)
            piece.store(gl.where((token < left % PIECE)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()


@gluon.jit
def _fold_tiles(
    query, key_ring, value_ring, keys_ready, values_ready, keys_free, values_free, done, begin, end, last,
    position, scale, top, mass, acc, GROUP_OF: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr,
    SUMS: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """Fold tokens `begin` to `end` into the online softmax. done: tiles so far, which give a ring's stage and phase.
    MASKED: lines see different tokens, and none from `last` on.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    KEYS: gl.constexpr = SIZES.KEYS
    STAGES: gl.constexpr = SIZES.STAGES
    if begin < end:
        nothing = gl.zeros([_LINES, KEYS], gl.float32, SCORES)
        stage, phase = done % STAGES, done // STAGES & 1
        mbarrier.wait(keys_ready.index(stage), phase)
        coming = warpgroup_mma(query, key_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[coming])
        mbarrier.arrive(keys_free.index(stage), count=1)
        weight, kept, top, mass = _weights_of(score, begin, last, position, scale, top, mass, MASKED, SCORES, SIZES)
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, SUMS))[:, None]
        operand = gl.convert_layout(weight.to(value_ring.dtype), OPERAND)
        mbarrier.wait(values_ready.index(stage), phase)
        for first in range(begin + KEYS, end, KEYS):
            before = stage
            done += 1
            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(keys_ready.index(stage), phase)
            coming = warpgroup_mma(query, key_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if MASKED:
                _clear_behind(value_ring, before, last - (first - KEYS), SIZES)
            adding = warpgroup_mma(operand, value_ring.index(before), acc, is_async=True)
            score = warpgroup_mma_wait(1, deps=[coming])
            mbarrier.arrive(keys_free.index(stage), count=1)
            weight, kept, top, mass = _weights_of(score, first, last, position, scale, top, mass, MASKED, SCORES, SIZES)
            # The position of this wait, and the use of the weights in the next one, keep the compiler from moving the
            # softmax behind the product that it should overlap.
            mbarrier.wait(values_ready.index(stage), phase)
            acc, operand = warpgroup_mma_wait(0, deps=[adding, gl.convert_layout(weight.to(value_ring.dtype), OPERAND)])
            mbarrier.arrive(values_free.index(before), count=1)
            acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, SUMS))[:, None]
        if MASKED:
            _clear_behind(value_ring, stage, last - (end - 1) // KEYS * KEYS, SIZES)
        adding = warpgroup_mma(operand, value_ring.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[adding])
        mbarrier.arrive(values_free.index(stage), count=1)
        done += 1
    return done, top, mass, acc


@gluon.jit
def _computing_group(
    q, query, key_ring, value_ring, keys_ready, values_ready, keys_free, values_free, seq_lens, query_start_loc,
    items, total, out, scale, GROUP_OF: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """Process the group's lines of items in order. GROUP_OF: 0 or 1, the group's index."""
    KV_HEADS: gl.constexpr = SIZES.KV_HEADS
    GROUP: gl.constexpr = SIZES.Q_HEADS // KV_HEADS
    DIM: gl.constexpr = SIZES.DIM
    WINDOW: gl.constexpr = SIZES.WINDOW
    TOKENS: gl.constexpr = SIZES.TOKENS
    KEYS: gl.constexpr = SIZES.KEYS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    line = GROUP_OF * _LINES + gl.arange(0, _LINES, gl.SliceLayout(1, FLAT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, FLAT))
    all_items = gl.load(total) * KV_HEADS
    programs = gl.num_programs(0)
    done = 0
    for turn in range(0, (all_items + programs - 1) // programs):
        there, row, tile, kv_head = item_of(turn, items, all_items, KV_HEADS)
        first_query, count, before, last, begin, end, whole_begin, whole_end = seen_of(
            there, row, tile, seq_lens, query_start_loc, TOKENS, KEYS, WINDOW
        )
        i = tile * TOKENS + line // GROUP
        head = kv_head * GROUP + line % GROUP
        ok = (line < TOKENS * GROUP) & (i < count) & there
        at = ((first_query + i).to(gl.int64) * SIZES.Q_HEADS + head)[:, None] * DIM + d[None, :]
        query.store(gl.load(q + at, mask=ok[:, None], other=0.0))
        fence_async_shared()
        line_of_scores = GROUP_OF * _LINES + gl.arange(0, _LINES, gl.SliceLayout(1, SCORES))
        position = before + tile * TOKENS + line_of_scores // GROUP
        top = gl.full([_LINES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        mass = gl.zeros([_LINES], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([_LINES, DIM], gl.float32, SUMS)
        edges = (begin, whole_begin, whole_end, end)
        for part in gl.static_range(3):
            if WINDOW > 0 or part > 0:
                done, top, mass, acc = _fold_tiles(
                    query, key_ring, value_ring, keys_ready, values_ready, keys_free, values_free, done,
                    edges[part], edges[part + 1], last, position, scale, top, mass, acc, GROUP_OF, part != 1, SCORES,
                    SUMS, SIZES,
                )  # fmt: skip
        divisor = gl.convert_layout(gl.where(mass == 0.0, 1.0, mass), gl.SliceLayout(1, SUMS))
        query.store((acc / divisor[:, None]).to(out.dtype.element_ty))
        gl.store(out + at, query.load(FLAT), mask=ok[:, None])


@gluon.jit(do_not_specialize=["table_stride", "nowhere"])
def groups_kernel(
    q, keys, values, block_tables, seq_lens, query_start_loc, items, total, out, scale,
    table_stride, nowhere, SIZES: gl.constexpr, COPIERS: gl.constexpr,
):  # fmt: skip
    """Process items of one KV head in order. A ring stage is ready when its bytes have arrived, and free when both
    consumer groups have released it.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MARK: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = SIZES.STAGES
    queries = gl.allocate_shared_memory(q.dtype.element_ty, [2, _LINES, SIZES.DIM], TILE)
    key_ring = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, SIZES.KEYS, SIZES.DIM], TILE)
    value_ring = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, SIZES.KEYS, SIZES.DIM], TILE)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _computing_group,
                (
                    q, queries.index(0), key_ring, value_ring, keys_ready, values_ready, keys_free, values_free,
                    seq_lens, query_start_loc, items, total, out, scale, 0, SIZES,
                ),
            ),
            (
                _computing_group,
                (
                    q, queries.index(1), key_ring, value_ring, keys_ready, values_ready, keys_free, values_free,
                    seq_lens, query_start_loc, items, total, out, scale, 1, SIZES,
                ),
            ),
            (
                copying_group,
                (
                    keys, values, key_ring, value_ring, keys_ready, values_ready, keys_free, values_free, block_tables,
                    table_stride, nowhere, seq_lens, query_start_loc, items, total, SIZES,
                ),
            ),
        ],
        [4, COPIERS],
        [_REGISTERS, _COPIERS_REGISTERS],
    )  # fmt: skip


def attend_in_groups(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int,
    plan: ChunkPlan,
    work: ChunkWork,
    out: torch.Tensor,
    grid: tuple[int],
) -> None:
    """Write `prefill_attention`'s output with warp-specialized programs.

    q, out: contiguous [T, q_heads, D], 16 bits, D 64 or 128. keys, values: contiguous [num_blocks, block_size,
    kv_heads, D]. scale: of the scores, for base 2. plan: with copiers, 128 lines and at least two stages: a consumer
    waits for the next values before it releases the last ones.
    """
    _, q_heads, head_dim = q.shape
    assert plan.lines == 2 * LINES and plan.stages > 1 and head_dim in HEAD_DIMS
    blocks, block_size, kv_heads, _ = keys.shape
    piece = piece_of(plan.keys, block_size)
    sizes = Sizes(
        q_heads, kv_heads, head_dim, block_size, window, plan.tokens(q_heads // kv_heads), plan.keys, piece,
        plan.stages,
    )  # fmt: skip
    groups_kernel[grid](
        q,
        lines_of(keys, piece),
        lines_of(values, piece),
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        work.items,
        work.total,
        out,
        scale,
        batch.block_tables.stride(0),
        blocks,
        SIZES=sizes,
        COPIERS=plan.copiers,
        num_warps=4,
    )
