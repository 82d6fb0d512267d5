"""Attention of a ragged batch over the paged cache: prompt chunks and decode rows in one launch.

Tiles have fixed sizes and are anchored at a row's first query and at position 0, so a row's bits do not depend on other
rows. Source: FlashAttention-2 (Dao, 2023), forward, over block tables.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Attention, AttentionShape, RopeTable
from runahead.runtime.kernels.triton.attention.block_table import kv_slots
from runahead.runtime.kernels.triton.attention.kv_dtype import head_scales
from runahead.runtime.kernels.triton.attention.prefill import prefill_attention
from runahead.runtime.kernels.triton.attention.prefill_schedule import (
    ChunkWork,
    cut_chunks,
    rows_scanned,
)
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan, chunk_plan
from runahead.runtime.kernels.triton.attention.query_tokens import LOG2_E, fold
from runahead.runtime.kernels.triton.attention.rope_and_cache import rotate_and_write

QUERY_TILE: Final = 32
KEY_TILE: Final = 64


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _chunk_kernel(
    q, keys, values, kv_scales, block_tables, seq_lens, query_start_loc, out, scale, table_stride, num_rows,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, TILE_TOKENS: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a row's queries for one query head. All rows' tiles are consecutive programs, so the grid
    does not depend on how tokens are distributed among rows.
    """
    r = tl.arange(0, ROWS)
    inside = r < num_rows
    count = tl.load(query_start_loc + 1 + r, mask=inside, other=0) - tl.load(query_start_loc + r, mask=inside, other=0)
    tiles = (count + QUERIES - 1) // QUERIES
    row = tl.sum((tl.cumsum(tiles, 0) <= tl.program_id(0)).to(tl.int32), 0)
    if row >= num_rows:
        return
    tile = tl.program_id(0) - tl.sum(tl.where(r < row, tiles, 0), 0)
    head = tl.program_id(1)
    first_query = tl.load(query_start_loc + row)
    num_queries = tl.load(query_start_loc + row + 1) - first_query
    seq_len = tl.load(seq_lens + row)
    if seq_len == 0:  # `out` has zeros, or what another kernel writes for the row
        return
    i = tile * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, DIM_PAD)
    t = tl.arange(0, TILE_TOKENS)
    in_dim = d < HEAD_DIM
    position = seq_len - num_queries + i
    q_ok = (i < num_queries)[:, None] & in_dim[None, :]
    q_at = ((first_query + i).to(tl.int64)[:, None] * Q_HEADS + head) * HEAD_DIM + d[None, :]
    query = tl.load(q + q_at, mask=q_ok, other=0.0)
    key_scale, value_scale = head_scales(kv_scales, head // (Q_HEADS // KV_HEADS), KV_HEADS)
    scale *= key_scale
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    end = tl.minimum(seq_len - num_queries + (tile + 1) * QUERIES, seq_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(seq_len - num_queries + tile * QUERIES + 1 - WINDOW, 0) // TILE_TOKENS * TILE_TOKENS
    for first in range(begin, end, TILE_TOKENS):
        token = first + t
        ok = token < end
        slot = kv_slots(block_tables + row.to(tl.int64) * table_stride, token, ok, BLOCK_SIZE)
        at = (slot * KV_HEADS + head // (Q_HEADS // KV_HEADS)) * HEAD_DIM
        kv_ok = ok[:, None] & in_dim[None, :]
        key = tl.load(keys + at[:, None] + d[None, :], mask=kv_ok, other=0.0)
        value = tl.load(values + at[:, None] + d[None, :], mask=kv_ok, other=0.0)
        seen = token[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        top, total, acc = fold(query, key, value, seen, scale, top, total, acc, CAP)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    tl.store(out + q_at, result.to(out.dtype.element_ty), mask=q_ok)


def chunk_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    window: int,
    cap: float = 0.0,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of each row's last queries over all of its tokens, which the cache already has.

    q: contiguous [T, q_heads, D]. keys, values: one layer's [num_blocks, block_size, kv_heads, D]. block_tables: int32
        [B, max_blocks]. seq_lens: int32 [B], queries included; 0 gives zeros. query_start_loc: int32 [B + 1], any
        partition of the T query tokens; tokens of no row get zeros. window: visible tokens, the query's included; 0:
        all.
    cap, kv_scales: see `Attention`. out: zeros, [T, q_heads, D]; a new tensor by default. Returns `out`.
    """
    _, q_heads, head_dim = q.shape
    rows, block_size, kv_heads = seq_lens.shape[0], keys.shape[1], keys.shape[2]
    out = torch.zeros_like(q) if out is None else out
    _chunk_kernel[(q.shape[0] // QUERY_TILE + rows, q_heads)](
        q,
        keys,
        values,
        kv_scales,
        block_tables,
        seq_lens,
        query_start_loc,
        out,
        scale * LOG2_E,
        block_tables.stride(0),
        rows,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        QUERIES=QUERY_TILE,
        TILE_TOKENS=KEY_TILE,
        DIM_PAD=max(triton.next_power_of_2(head_dim), 16),
        ROWS=rows_scanned(rows),
        CAP=cap * LOG2_E,
        num_warps=4,
    )
    return out


class ChunkAttention:
    """Attention in the layers of one launch with any batch: `prefill_attention` if a plan was measured for this GPU and
    shape, else `chunk_attention`. A query token's bits do not depend on its row's other query tokens.
    """

    def __init__(self, batch: ForwardBatch, cache: KVCache, ropes: Sequence[RopeTable]) -> None:
        self._batch, self._cache, self._ropes = batch, cache, ropes
        self._works: dict[AttentionShape, tuple[ChunkPlan, ChunkWork] | None] = {}

    def attended(
        self, qkv: torch.Tensor, weights: Attention, cache_index: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute everything between the QKV product and the output product.

        qkv: contiguous [T, (heads + 2 * kv_heads) * D]. cache_index: of the mixer's keys and values, written first.
        out: zeros, contiguous [T, heads * D]; a new tensor by default. Returns `out`.
        """
        batch, shape, rope = self._batch, weights.shape, self._ropes[weights.rope]
        keys, values = self._cache.keys[cache_index], self._cache.values[cache_index]
        q = rotate_and_write(
            qkv, rope.cos, rope.sin, batch.positions, batch.slot_mapping, keys, values, shape.heads, weights.q_norm,
            weights.k_norm, weights.kv_scales,
        )  # fmt: skip
        planned = self._work(shape, q.dtype)
        by_head = None if out is None else out.view(q.shape)
        if planned is None:
            attended = chunk_attention(
                q, keys, values, batch.block_tables, batch.seq_lens, batch.query_start_loc, shape.scale,
                weights.window, weights.score_cap, weights.kv_scales, by_head,
            )  # fmt: skip
        else:
            attended = prefill_attention(
                q, keys, values, batch, shape.scale, weights.window, *planned, weights.score_cap, weights.kv_scales,
                by_head,
            )  # fmt: skip
        return attended.view(qkv.shape[0], shape.q_size)

    def _work(self, shape: AttentionShape, dtype: torch.dtype) -> tuple[ChunkPlan, ChunkWork] | None:
        """Split the launch once for all layers of a shape."""
        if shape not in self._works:
            plan = chunk_plan(shape, dtype)
            self._works[shape] = None if plan is None else (plan, cut_chunks(self._batch, shape, plan))
        return self._works[shape]
