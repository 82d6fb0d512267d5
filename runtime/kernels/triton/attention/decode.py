"""Decode attention in one kernel, including head norms, rotary embedding, the cache write of the new key and value, and
the reduction of a row's parts.

`attention/schedule.py` splits a row's KV tiles into items. A program processes items in order: tiles of one row, for
one KV head and its query heads. A row with one item is written at once; otherwise each item leaves its parts, or a
group's sum if it is a whole group, and the last program to arrive reduces them in order, with the same bits.

Source: Flash-Decoding (Dao et al., 2023), with the online softmax of Milakov and Gimelshein (2018) over an item's
tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Attention, RopeTable
from runahead.runtime.kernels.triton.attention.block_table import kv_slots
from runahead.runtime.kernels.triton.attention.kv_dtype import as_kept, head_scales
from runahead.runtime.kernels.triton.attention.query_tokens import (
    LOG2_E,
    fold,
    head_and_partner,
    norm_of_head,
    repeated_lines,
    rotated_head,
)
from runahead.runtime.kernels.triton.attention.schedule import MAX_PARTS, RECORD, AttentionPlan
from runahead.runtime.kernels.triton.attention.split_kv import (
    PartBuffers,
    add_parts,
    leave_part,
    no_part,
    parts_at_a_time,
    with_part,
)
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.ops.softcap import bounded

_MAX_PARTS, _RECORD = tl.constexpr(MAX_PARTS), tl.constexpr(RECORD)


@triton.jit
def _item(item, items, all_items, num_rows, HEADS: tl.constexpr):
    """Read an item of `attention/schedule.py`: its row, the row's length, its first token and end, the row's first sum,
    their number, a part's tiles and the item's first sum.

    No program uses what is read past the last item, but without the selects the compiler orders the loads otherwise:
    a step of eight rows takes 0.2 % longer with 8B and 1.1 % with 0.6B (H200, 2026-12-01).
    """
    there = item < all_items
    at = items + tl.minimum(item // HEADS, num_rows * _MAX_PARTS - 1) * _RECORD
    row = tl.where(there, tl.load(at), 0)
    first = tl.where(there, tl.load(at + 1), 0)
    end = tl.where(there, tl.load(at + 2), 0)
    return row, tl.load(at + 6), first, end, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 7)


class _Shape(NamedTuple):
    """Constants of a layer's attention, of `Attention` and the cache. CAP: in units of the base-2 scores."""

    Q_HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    BLOCK_SIZE: int
    WINDOW: int
    SINCE: int  # the first visible position
    CAP: float


@triton.jit
def _query_token(
    qkv, keys, values, kv_scales, table, token, kv_head, position, begins_row, angle, norms, key_scale, value_scale,
    key_factor, SHAPE: tl.constexpr, LINES: tl.constexpr, PART_LINES: tl.constexpr, DIM_PAD: tl.constexpr, DEPENDENT:
    tl.constexpr,
):  # fmt: skip
    """Wait, then return the lines of an item's query token, [LINES, DIM_PAD], and a sum of tokens: of the query token
    alone if the item begins the row, whose key and value are then written too, else empty. norms: of queries and keys,
    and eps.
    """
    # Waiting is part of an item, and later items skip it: before all items the compiler would move their common code
    # behind the wait, about 300 instructions before the first dependent load.
    wait_for_predecessors(DEPENDENT)
    Q_HEADS: tl.constexpr = SHAPE.Q_HEADS
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    q_norm, k_norm, eps = norms
    q_weight, q_of_partner = q_norm
    k_weight, k_of_partner = k_norm
    c, s = angle
    lane = tl.arange(0, PART_LINES)
    head = qkv + token.to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM + (kv_head * GROUP + lane)[:, None] * HEAD_DIM
    # Issue all loads of an item before the first reduction, which synchronizes its warps.
    query, partner = head_and_partner(head, (lane < GROUP)[:, None], HEAD_DIM, DIM_PAD)
    one = tl.arange(0, 1)[:, None]
    d = tl.arange(0, DIM_PAD)
    in_dim = d < HEAD_DIM
    line = qkv + token.to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    key_at = line + (Q_HEADS + kv_head + one) * HEAD_DIM
    key, key_partner = head_and_partner(key_at, (one == 0) & begins_row, HEAD_DIM, DIM_PAD)
    value = tl.load(line + (Q_HEADS + KV_HEADS + kv_head) * HEAD_DIM + d, mask=in_dim & begins_row, other=0.0)
    home = tl.load(table + position // BLOCK_SIZE, mask=begins_row, other=0).to(tl.int64)
    query = rotated_head(query, partner, q_weight, q_of_partner, c, s, eps, HEAD_DIM, DIM_PAD)
    query = query.to(qkv.dtype.element_ty)
    lines = repeated_lines(query, LINES)
    top, total, acc = no_part(LINES, DIM_PAD)
    if begins_row:
        # Merging the query token into a tile would put it among keys loaded directly from memory.
        turned = rotated_head(key, key_partner, k_weight, k_of_partner, c, s, eps, HEAD_DIM, DIM_PAD)
        new_key = as_kept(turned, key_scale, kv_scales, keys.dtype.element_ty)
        new_value = as_kept(value, value_scale, kv_scales, values.dtype.element_ty)
        cell = ((home * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        tl.store(keys + cell + d[None, :] + one, new_key, mask=in_dim[None, :])
        tl.store(values + cell + d, new_value, mask=in_dim)
        score = bounded(tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * key_factor, SHAPE.CAP)
        top = repeated_lines(score, LINES)
        total = tl.exp2(top - top)  # 1, or NaN for a non-finite score
        acc += new_value.to(tl.float32)[None, :]
    return lines, top, total, acc


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(
    qkv, keys, values, kv_scales, block_tables, query_start_loc, items, num_items, rope, norms, out, parts, scale,
    table_stride, num_rows, num_positions, SHAPE: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr,
    PART_LINES: tl.constexpr, DIM_PAD: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    GROUP_PARTS: tl.constexpr, SPREAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Process items in order. EARLY: an item's first tiles are requested before its query token, and so before the
    wait: a loop requests tiles before its first iteration, which here reads the query token. SPREAD: an item may be
    some of a group's parts. query_start_loc: where rows of the launch have other numbers of query tokens than one.
    norms: weights of queries and keys, and eps.
    """
    let_dependents_start(DEPENDENT)
    Q_HEADS: tl.constexpr = SHAPE.Q_HEADS
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    all_items = tl.load(num_items) * KV_HEADS
    together = tl.load(num_items + 1)
    d = tl.arange(0, DIM_PAD)
    in_dim = d < HEAD_DIM
    # Items, block tables and older keys are constant during F.
    begin = tl.program_id(0)
    row, seq_len, first_token, end, before, sums, tiles, sum_index = _item(begin, items, all_items, num_rows, KV_HEADS)
    q_norm, k_norm, eps = norms
    head_norms = norm_of_head(q_norm, HEAD_DIM, DIM_PAD), norm_of_head(k_norm, HEAD_DIM, DIM_PAD), eps
    # A program without an item ends and leaves its registers to the next kernel. One program waits in any case.
    if (begin == 0) & (all_items == 0):
        wait_for_predecessors(DEPENDENT)
    step = tl.num_programs(0)
    for item in range(begin, all_items, step):
        kv_head = item % KV_HEADS
        token = row
        if query_start_loc is not None:
            token = tl.load(query_start_loc + row)
        old_len = seq_len - 1
        lane = tl.arange(0, LINES)
        ok, head = lane < GROUP, kv_head * GROUP + lane
        position = tl.minimum(tl.maximum(old_len, 0), num_positions - 1)
        table = block_tables + row.to(tl.int64) * table_stride
        key_scale, value_scale = head_scales(kv_scales, kv_head, KV_HEADS)
        key_factor = scale * key_scale
        at = tl.where(d < HEAD_DIM // 2, d, d - HEAD_DIM // 2)[None, :] + position * (HEAD_DIM // 2)
        cos = tl.load(rope[0] + at, mask=in_dim[None, :], other=0.0)
        angle = cos, tl.load(rope[1] + at, mask=in_dim[None, :], other=0.0)
        begins_row = (sum_index == before) & (seq_len > 0)
        lines = tl.zeros([LINES, DIM_PAD], qkv.dtype.element_ty)
        top, total, acc = no_part(LINES, DIM_PAD)
        if not EARLY:
            lines, top, total, acc = _query_token(
                qkv, keys, values, kv_scales, table, token, kv_head, position, begins_row, angle, head_norms, key_scale,
                value_scale, key_factor, SHAPE, LINES, PART_LINES, DIM_PAD, DEPENDENT,
            )  # fmt: skip
        arrivals = sums
        one_sum = True  # of an item that is a group or a row; otherwise it leaves each part for the row's last program
        if SPREAD:
            arrivals = tl.where(together < GROUP_PARTS, (sums + together - 1) // together, sums)
            one_sum = (together == GROUP_PARTS) | (arrivals == 1)
        sum_index = sum_index * KV_HEADS + kv_head
        sum_top, sum_total, sum_acc = no_part(LINES, DIM_PAD)
        for i in tl.range(0, tl.maximum((end - first_token + TILE - 1) // TILE, EARLY), 1, num_stages=STAGES):
            cached = first_token + i * TILE + tl.arange(0, TILE)
            in_tile = cached < end
            if SHAPE.WINDOW > 0:
                in_tile = in_tile & (cached >= old_len + 1 - SHAPE.WINDOW)
            if SHAPE.SINCE > 0:
                in_tile = in_tile & (cached >= SHAPE.SINCE)
            cell = kv_slots(table, cached, in_tile, SHAPE.BLOCK_SIZE) * KV_HEADS + kv_head
            cell = cell[:, None] * HEAD_DIM + d[None, :]
            there = in_tile[:, None] & in_dim[None, :]
            k, v = tl.load(keys + cell, mask=there, other=0.0), tl.load(values + cell, mask=there, other=0.0)
            if EARLY:
                if i == 0:
                    lines, top, total, acc = _query_token(
                        qkv, keys, values, kv_scales, table, token, kv_head, position, begins_row, angle, head_norms,
                        key_scale, value_scale, key_factor, SHAPE, LINES, PART_LINES, DIM_PAD, DEPENDENT,
                    )  # fmt: skip
            if (i > 0) & (i % tiles == 0):
                if one_sum:
                    sum_top, sum_total, sum_acc = with_part(sum_top, sum_total, sum_acc, top, total, acc)
                else:
                    leave_part(parts, sum_index, top, total, acc, ok, HEAD_DIM, PART_LINES, DIM_PAD)
                    sum_index += KV_HEADS
                top, total, acc = no_part(LINES, DIM_PAD)
            top, total, acc = fold(lines, k, v, in_tile[None, :], key_factor, top, total, acc, SHAPE.CAP)
        top, total, acc = with_part(sum_top, sum_total, sum_acc, top, total, acc)

        if arrivals == 1:
            # A NaN score must reach the row's logits, where S reports it; a masked row gets zeros.
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
            out_at = (token.to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
            tl.store(out + out_at, result.to(out.dtype.element_ty), mask=ok[:, None] & in_dim[None, :])
        else:
            leave_part(parts, sum_index, top, total, acc, ok, HEAD_DIM, PART_LINES, DIM_PAD)
            tl.debug_barrier()
            if tl.atomic_add(parts.arrived + row * KV_HEADS + kv_head, 1, sem="acq_rel") == arrivals - 1:
                tl.store(parts.arrived + row * KV_HEADS + kv_head, 0)
                add_parts(
                    parts, out, value_scale, before, sums, tl.where(one_sum, _MAX_PARTS, GROUP_PARTS), token, kv_head,
                    Q_HEADS, KV_HEADS, HEAD_DIM, PART_LINES, DIM_PAD, PARTS,
                )  # fmt: skip
        following = item + step
        if following < all_items:  # otherwise nothing orders the dependent kernels
            row, seq_len, first_token, end, before, sums, tiles, sum_index = _item(
                following, items, all_items, num_rows, KV_HEADS
            )


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    items: torch.Tensor,
    num_items: torch.Tensor,
    rope: RopeTable,
    weights: Attention,
    plan: AttentionPlan,
    buffers: PartBuffers,
    *,
    dependent: bool,
    query_start_loc: torch.Tensor | None = None,
    ragged: bool = False,
) -> None:
    """Write new keys and values into the cache, and attention's result into `out`, for a query token of each row.

    qkv: contiguous [T or more, (heads + 2 * kv_heads) * D], queries, keys and values before norms and rotation. out:
    contiguous [T or more, heads * D]; zeros for rows of length 0. keys, values: one layer's [num_blocks, block_size,
    kv_heads, D]. block_tables: int32 [R, max_blocks]. seq_lens: int32 [R], query token included. items, num_items: one
    window's part of the `AttentionWork` for this plan. weights: shape, window, head norms, score_cap, kv_scales and
    first position. ragged: a mixed launch, split as such: rows with another number of query tokens than one get
    nothing, and query_start_loc, int32 [R + 1], has each row's first.
    """
    assert not ragged or query_start_loc is not None
    rows, block_size, shape = seq_lens.shape[0], keys.shape[1], weights.shape
    q_norm, k_norm = weights.q_norm, weights.k_norm
    dim_pad = max(triton.next_power_of_2(shape.head_dim), 16)
    lines = max(triton.next_power_of_2(shape.heads // shape.kv_heads), 16)
    _decode_kernel[(plan.programs,)](
        qkv,
        keys,
        values,
        weights.kv_scales,
        block_tables,
        query_start_loc if ragged else None,
        items,
        num_items,
        (rope.cos, rope.sin),
        (None, None, None) if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps),
        out,
        buffers,
        shape.scale * LOG2_E,
        block_tables.stride(0),
        rows,
        rope.cos.shape[0],
        SHAPE=_Shape(
            shape.heads, shape.kv_heads, shape.head_dim, block_size, weights.window, weights.first,
            weights.score_cap * LOG2_E,
        ),
        TILE=plan.tile,
        LINES=lines,
        PART_LINES=buffers.partial.shape[1],
        DIM_PAD=dim_pad,
        PARTS=parts_at_a_time(buffers, dim_pad, plan, rows),
        STAGES=plan.stages,
        EARLY=int(plan.early),
        GROUP_PARTS=plan.group,
        SPREAD=plan.spreads(rows),
        DEPENDENT=dependent,
        num_warps=plan.warps,
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )  # fmt: skip
