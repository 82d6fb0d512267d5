"""Prefill attention in large tiles on the matrix units: the query heads of a KV head, for several query tokens, are the
lines of one tile. Only KV tiles at the ends of a tile's range are masked.

Query tiles are anchored at a row's first query token, KV tiles at position 0. Source: FlashAttention-2 (Dao, 2023),
forward, over block tables.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.attention.kv_dtype import head_scales
from runahead.runtime.kernels.triton.attention.prefill_schedule import ChunkWork, item_of, seen_of
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan
from runahead.runtime.kernels.triton.attention.query_tokens import LOG2_E, softmax_step
from runahead.runtime.kernels.triton.ops.softcap import bounded


@triton.jit(do_not_specialize=["table_stride"])
def _lines_kernel(
    q, keys, values, kv_scales, block_tables, seq_lens, query_start_loc, items, total, out, scale,
    table_stride, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE:
    tl.constexpr, WINDOW: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, DIM_PAD:
    tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Process items of one KV head in order."""
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    ROW_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    d = tl.arange(0, DIM_PAD)
    t = tl.arange(0, KEYS)
    all_items = tl.load(total) * KV_HEADS
    programs = tl.num_programs(0)
    for turn in range(0, (all_items + programs - 1) // programs):
        there, row, tile, kv_head = item_of(turn, items, all_items, KV_HEADS)
        first_query, count, old_len, last, begin, end, whole_begin, whole_end = seen_of(
            there, row, tile, seq_lens, query_start_loc, TOKENS, KEYS, WINDOW
        )
        # A tile's lines: query token in the row, query head and validity.
        line = tl.arange(0, LINES)
        i, head = tile * TOKENS + line // GROUP, kv_head * GROUP + line % GROUP
        ok = (line < TOKENS * GROUP) & (i < count) & there
        position = old_len + i
        token_ok = ok[:, None] & (d < HEAD_DIM)[None, :]
        q_at = ((first_query + i).to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
        query = tl.load(q + q_at, mask=token_ok, other=0.0)
        key_scale, value_scale = head_scales(kv_scales, kv_head, KV_HEADS)
        key_factor = scale * key_scale
        top = tl.full([LINES], float("-inf"), tl.float32)
        mass = tl.zeros([LINES], tl.float32)
        acc = tl.zeros([LINES, DIM_PAD], tl.float32)
        table = block_tables + row.to(tl.int64) * table_stride
        of_keys, of_values = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
        edges = (begin, whole_begin, whole_end, end)
        for part in tl.static_range(0 if WINDOW > 0 else 1, 3):  # every line sees all tokens of part 1
            # Look up blocks one tile ahead, so that loads of keys and values can be issued early.
            begin, end = edges[part], edges[part + 1]
            block = tl.load(table + (begin + t) // BLOCK_SIZE, mask=begin + t < last, other=0)
            for first in tl.range(begin, end, KEYS, num_stages=STAGES):
                token = first + t
                at = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * ROW_STRIDE
                at = at[:, None] + d[None, :]
                block = tl.load(table + (token + KEYS) // BLOCK_SIZE, mask=token + KEYS < last, other=0)
                if part != 1:
                    known = (token < last)[:, None] & (d < HEAD_DIM)[None, :]
                    key = tl.load(of_keys + at, mask=known, other=0.0)
                    value = tl.load(of_values + at, mask=known, other=0.0)
                elif HEAD_DIM < DIM_PAD:
                    key = tl.load(of_keys + at, mask=(d < HEAD_DIM)[None, :], other=0.0)
                    value = tl.load(of_values + at, mask=(d < HEAD_DIM)[None, :], other=0.0)
                else:
                    key = tl.load(of_keys + at)
                    value = tl.load(of_values + at)
                key, value = key.to(query.dtype), value.to(query.dtype)
                score = tl.dot(query, tl.trans(key), input_precision="ieee")
                # Capped scores are scaled here; others are scaled with the maximum, inside the exponent.
                if CAP > 0.0:
                    score = bounded(score * key_factor, CAP)
                if part != 1:
                    seen = token[None, :] <= position[:, None]
                    if WINDOW > 0:
                        seen = seen & (token[None, :] > position[:, None] - WINDOW)
                    score = tl.where(seen, score, float("-inf"))
                factor = 1.0 if CAP > 0.0 else key_factor
                weight, kept, top, mass = softmax_step(score, factor, top, mass, part != 1)
                acc = acc * kept[:, None]
                acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        result = acc / tl.where(mass == 0.0, 1.0, mass)[:, None] * value_scale
        tl.store(out + q_at, result.to(out.dtype.element_ty), mask=token_ok)


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int,
    plan: ChunkPlan,
    work: ChunkWork,
    cap: float = 0.0,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention like `chunk_attention.chunk_attention`: each row's last queries over all of its tokens.

    q: contiguous [T, q_heads, D]. keys, values: one layer's [num_blocks, block_size, kv_heads, D]. scale: of the
    scores, above 0. window: visible tokens, the query's included; 0: all. work: of this batch, shape and plan. cap,
    kv_scales: see `Attention`. out: as `chunk_attention` has it. Returns `out`; zeros for masked rows.
    """
    assert scale > 0, "the largest score must have the largest product"
    _, q_heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    tokens = plan.tokens(q_heads // kv_heads)
    dim_pad = max(triton.next_power_of_2(head_dim), 16)
    out = torch.zeros_like(q) if out is None else out
    grid = (min(plan.programs, work.items.shape[0] * kv_heads),)
    # Only the other form, which accepts any plan, supports a cap and FP8.
    if plan.copiers and cap == 0 and kv_scales is None:
        # Gluon is experimental and may change: import it only if a plan needs it.
        from runahead.runtime.kernels.triton.attention.prefill_hopper import attend_in_groups

        attend_in_groups(q, keys, values, batch, scale * LOG2_E, window, plan, work, out, grid)
    else:
        _lines_kernel[grid](
            q,
            keys,
            values,
            kv_scales,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            work.items,
            work.total,
            out,
            scale * LOG2_E,
            batch.block_tables.stride(0),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=keys.shape[1],
            WINDOW=window,
            LINES=plan.lines,
            TOKENS=tokens,
            KEYS=plan.keys,
            DIM_PAD=dim_pad,
            STAGES=plan.stages,
            CAP=cap * LOG2_E,
            num_warps=plan.warps,
        )
    return out
