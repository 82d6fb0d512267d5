"""Decode attention in one kernel, including head norms, rotary embedding, the cache write of the new key and value, and
the reduction of a row's parts.

`attention/schedule.py` splits a row's KV tiles into items. A program processes items in order: tiles of one row, for
one KV head and its query heads. A row with one item is written at once; otherwise each item writes a partial result,
and the last program to arrive reduces them in order. In an exact plan an item may be a group of parts; its sum equals
the one that the last program makes if each part is an item.

Source: Flash-Decoding (Dao et al., 2023), with the online softmax of Milakov and Gimelshein (2018) over an item's
tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Attention, RopeTable
from runahead.runtime.kernels.triton.attention.kv_dtype import head_scales
from runahead.runtime.kernels.triton.attention.query_tokens import (
    LOG2_E,
    MAX_QUERIES,
    angle_of,
    fold,
    fold_new_token,
    fold_new_tokens,
    head_and_partner,
    lines_of,
    new_token_of,
    new_tokens_of,
    norm_of_head,
    queries_of,
    repeated_lines,
    rotated_head,
    share_of,
)
from runahead.runtime.kernels.triton.attention.schedule import MAX_PARTS, RECORD, AttentionPlan
from runahead.runtime.kernels.triton.attention.split_kv import PartBuffers, add_parts, parts_at_a_time, with_part
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.gpu.unrolled import longer

_MAX_PARTS, _RECORD = tl.constexpr(MAX_PARTS), tl.constexpr(RECORD)
_LATE_STAGES: Final = 3  # of tiles that a plan would have had early
_WARPS_OF_SEVERAL: Final = 4  # of a program, at least, if rows may have several query tokens


@triton.jit
def _item(item, items, all_items, num_rows, HEADS: tl.constexpr):
    """Read an item of `attention/schedule.py`: its row, the row's length, its first token and end, the row's first
    index, its number of items, a part's tiles and the item's index. Past the last item the range is empty and begins at
    0: from an uninitialized value a tile's tokens could overflow int32 and seem to precede the end.
    """
    there = item < all_items
    at = items + tl.minimum(item // HEADS, num_rows * _MAX_PARTS - 1) * _RECORD
    row = tl.where(there, tl.load(at), 0)
    first = tl.where(there, tl.load(at + 1), 0)
    end = tl.where(there, tl.load(at + 2), 0)
    return row, tl.load(at + 6), first, end, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 7)


@triton.jit
def _tile(
    first, end, old_len, kv_head, keys, values, table, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, DIM_PAD: tl.constexpr, SINCE: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys and values from token `first` up to `end` without the row's query tokens, and the mask of
    tokens that the first query token sees. SINCE: the first visible position.
    """
    token = first + tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    seen = token < tl.minimum(end, old_len)
    if WINDOW > 0:
        seen = seen & (token >= old_len + 1 - WINDOW)
    if SINCE > 0:
        seen = seen & (token >= SINCE)
    block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    at = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    ok = seen[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(keys + at, mask=ok, other=0.0), tl.load(values + at, mask=ok, other=0.0), seen


@triton.jit
def _first_tiles(
    first, end, old_len, kv_head, keys, values, table, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, DIM_PAD: tl.constexpr, SINCE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Load the first COUNT tiles of an item, as `_tile` does: keys, values and masks, COUNT of each."""
    of_keys, of_values, masks = (), (), ()
    for i in tl.static_range(COUNT):
        k, v, seen = _tile(
            first + i * TILE, end, old_len, kv_head, keys, values, table, BLOCK_SIZE, KV_HEADS, HEAD_DIM, WINDOW, TILE,
            DIM_PAD, SINCE,
        )  # fmt: skip
        of_keys, of_values, masks = longer(of_keys, k), longer(of_values, v), longer(masks, seen)
    return of_keys, of_values, masks


@triton.jit
def _seen_by_lines(seen, first, old_len, of_line, QUERIES: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Mask a tile's tokens for each line, [1 or lines, TILE]. seen: mask of the row's first query token, [TILE]."""
    seen = seen[None, :]
    if QUERIES > 1:
        if WINDOW > 0:
            seen = seen & (first + tl.arange(0, TILE)[None, :] > (old_len + of_line - WINDOW)[:, None])
    return seen


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(
    qkv, keys, values, kv_scales, block_tables, query_start_loc, items, num_items, cos, sin, q_norm, k_norm, out,
    partial, partial_top, partial_total, arrived, scale, eps, table_stride, num_rows, num_positions, Q_HEADS:
    tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE:
    tl.constexpr, QUERIES: tl.constexpr, SHARE: tl.constexpr, LINES: tl.constexpr, PART_LINES: tl.constexpr, DIM_PAD:
    tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr, GROUP_PARTS:
    tl.constexpr, HAS_NORM: tl.constexpr, CAP: tl.constexpr, DEPENDENT: tl.constexpr, SINCE: tl.constexpr, RAGGED:
    tl.constexpr,
):  # fmt: skip
    """Process items in order. EARLY: tiles of an item that are loaded early, before the wait for the first item, and
    during the previous item's reduction.
    """
    let_dependents_start(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    SHARES: tl.constexpr = QUERIES // SHARE
    HEADS: tl.constexpr = KV_HEADS * SHARES
    all_items = tl.load(num_items) * HEADS
    d = tl.arange(0, DIM_PAD)
    in_dim = d < HEAD_DIM
    # Items, block tables and older keys are constant during F.
    begin = tl.program_id(0)
    row, seq_len, first_token, end, before, parts, tiles, place = _item(begin, items, all_items, num_rows, HEADS)
    if QUERIES > 1:  # constant too, and needed to address the row's data
        of_row, in_row = queries_of(row, query_start_loc, QUERIES, RAGGED)
    else:
        in_row = 1
    if EARLY > 0:
        key, value, seen = _first_tiles(
            first_token, end, seq_len - in_row, begin % HEADS // SHARES, keys, values,
            block_tables + row.to(tl.int64) * table_stride, BLOCK_SIZE, KV_HEADS, HEAD_DIM, WINDOW, TILE, DIM_PAD,
            SINCE, EARLY,
        )  # fmt: skip
    q_weight, q_of_partner = norm_of_head(q_norm, HEAD_DIM, DIM_PAD, HAS_NORM)
    k_weight, k_of_partner = norm_of_head(k_norm, HEAD_DIM, DIM_PAD, HAS_NORM)
    if begin >= all_items:
        wait_for_predecessors(DEPENDENT)
    step = tl.num_programs(0)
    for item in range(begin, all_items, step):
        head_share = item % HEADS
        kv_head = head_share // SHARES
        if QUERIES > 1:
            first_query = of_row
            count = in_row
        else:
            first_query, count = queries_of(row, query_start_loc, QUERIES, RAGGED)
        old_len = seq_len - count
        of_line, head, ok = lines_of(head_share % SHARES, kv_head, count, LINES, GROUP, QUERIES, SHARE)
        of_real, real_head, real = lines_of(head_share % SHARES, kv_head, count, PART_LINES, GROUP, QUERIES, SHARE)
        token = first_query + of_line
        position = tl.minimum(tl.maximum(old_len + of_real, 0), num_positions - 1)
        line = qkv + (first_query + of_real).to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
        if QUERIES > 1:
            line = line[:, None]
        table = block_tables + row.to(tl.int64) * table_stride
        key_scale, value_scale = head_scales(kv_scales, kv_head, KV_HEADS)
        key_factor = scale * key_scale
        c, s = angle_of(cos, sin, position, HEAD_DIM, DIM_PAD, QUERIES > 1)
        # Inside the loop, where later items skip it: before the loop the compiler would move items' common code behind
        # the wait, about 300 instructions before the first dependent load.
        wait_for_predecessors(DEPENDENT)
        # Issue all loads of an item before the first reduction, which synchronizes its warps.
        ends_row = (end == seq_len) & (end > first_token)
        query, partner = head_and_partner(line + real_head[:, None] * HEAD_DIM, real[:, None], HEAD_DIM, DIM_PAD)
        if QUERIES == 1:
            new_key, new_partner, new_value, home = new_token_of(
                qkv, table, position, token, kv_head, ends_row, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_PAD
            )
        else:
            new_key, new_partner, new_value, home, new_position, there = new_tokens_of(
                qkv, table, old_len, num_positions, first_query, count, kv_head, ends_row, Q_HEADS, KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, DIM_PAD,
            )  # fmt: skip
        query = rotated_head(query, partner, q_weight, q_of_partner, c, s, eps, HEAD_DIM, DIM_PAD, HAS_NORM)
        query = query.to(qkv.dtype.element_ty)
        lines = repeated_lines(query, LINES)
        top = tl.full([LINES], float("-inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        acc = tl.zeros([LINES, DIM_PAD], tl.float32)
        if ends_row:
            # The row's last item handles its query tokens separately: merging them into a tile would put them among
            # keys loaded directly from memory.
            if QUERIES == 1:
                turned = rotated_head(
                    new_key, new_partner, k_weight, k_of_partner, c, s, eps, HEAD_DIM, DIM_PAD, HAS_NORM
                )
                top, total, acc = fold_new_token(
                    query, turned, new_value, home, keys, values, kv_scales, key_scale, value_scale, position,
                    key_factor, kv_head, acc, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_PAD, CAP,
                )  # fmt: skip
            else:
                top, total, acc = fold_new_tokens(
                    lines, new_key, new_partner, new_value, home, new_position, there, keys, values, kv_scales,
                    key_scale, value_scale, k_weight, k_of_partner, cos, sin, key_factor, eps, of_line, kv_head,
                    head_share % SHARES == 0, top, total, acc, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, DIM_PAD,
                    HAS_NORM, CAP,
                )  # fmt: skip
        for i in tl.static_range(EARLY):
            by_lines = _seen_by_lines(seen[i], first_token + i * TILE, old_len, of_line, QUERIES, WINDOW, TILE)
            top, total, acc = fold(lines, key[i], value[i], by_lines, key_factor, top, total, acc, CAP)
        last = first_token
        if EXACT:
            # The newest part first, since it has the newest tokens; then the others in order.
            last = end
            if ends_row:
                last = first_token + (end - first_token - 1) // (tiles * TILE) * (tiles * TILE)
            sum_top = tl.full([LINES], float("-inf"), tl.float32)
            sum_total = tl.zeros([LINES], tl.float32)
            sum_acc = tl.zeros([LINES, DIM_PAD], tl.float32)
        of_last = (tl.maximum(tl.minimum(end, old_len) - last, 0) + TILE - 1) // TILE
        for i in tl.range(EARLY, of_last + (last - first_token) // TILE, 1, num_stages=STAGES):
            first = first_token + i * TILE
            if EXACT:
                further = i - of_last
                first = tl.where(further < 0, last + i * TILE, first_token + further * TILE)
            k, v, in_tile = _tile(
                first, end, old_len, kv_head, keys, values, table, BLOCK_SIZE, KV_HEADS, HEAD_DIM, WINDOW, TILE,
                DIM_PAD, SINCE,
            )  # fmt: skip
            in_tile = _seen_by_lines(in_tile, first, old_len, of_line, QUERIES, WINDOW, TILE)
            if EXACT:
                if (further >= 0) & (further % tiles == 0):
                    sum_top, sum_total, sum_acc = with_part(sum_top, sum_total, sum_acc, top, total, acc)
                    top = tl.full([LINES], float("-inf"), tl.float32)
                    total = tl.zeros([LINES], tl.float32)
                    acc = tl.zeros([LINES, DIM_PAD], tl.float32)
            top, total, acc = fold(lines, k, v, in_tile, key_factor, top, total, acc, CAP)
        if EXACT:
            top, total, acc = with_part(sum_top, sum_total, sum_acc, top, total, acc)

        out_ok = ok[:, None] & in_dim[None, :]
        if parts == 1:
            # A NaN score must reach the row's logits, where S reports it; a masked row gets zeros.
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
            out_at = (token.to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
            tl.store(out + out_at, result.to(out.dtype.element_ty), mask=out_ok)
        else:
            mine = (place * HEADS + head_share) * PART_LINES + tl.arange(0, LINES)
            tl.store(partial + mine[:, None] * HEAD_DIM + d[None, :], acc, mask=out_ok)
            tl.store(partial_top + mine, top, mask=ok)
            tl.store(partial_total + mine, total, mask=ok)
            tl.debug_barrier()
            if tl.atomic_add(arrived + row * HEADS + head_share, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived + row * HEADS + head_share, 0)
                add_parts(
                    partial, partial_top, partial_total, out, value_scale, before, parts, first_query, count,
                    head_share, Q_HEADS, KV_HEADS, HEAD_DIM, QUERIES, SHARE, PART_LINES, DIM_PAD, PARTS, EXACT,
                    GROUP_PARTS,
                )  # fmt: skip
        following = item + step
        if following < all_items:  # otherwise nothing orders the dependent kernels
            row, seq_len, first_token, end, before, parts, tiles, place = _item(
                following, items, all_items, num_rows, HEADS
            )
            if QUERIES > 1:
                of_row, in_row = queries_of(row, query_start_loc, QUERIES, RAGGED)
            if EARLY > 0:
                key, value, seen = _first_tiles(
                    first_token, end, seq_len - in_row, following % HEADS // SHARES, keys, values,
                    block_tables + row.to(tl.int64) * table_stride, BLOCK_SIZE, KV_HEADS, HEAD_DIM, WINDOW, TILE,
                    DIM_PAD, SINCE, EARLY,
                )  # fmt: skip


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
    queries: int = 1,
    query_start_loc: torch.Tensor | None = None,
    ragged: bool = False,
) -> None:
    """Write new keys and values into the cache, and attention's result into `out`, for a few query tokens a row.

    qkv: contiguous [T or more, (heads + 2 * kv_heads) * D], queries, keys and values before norms and rotation. out:
    contiguous [T or more, heads * D]; zeros for rows of length 0. keys, values: one layer's [num_blocks, block_size,
    kv_heads, D]. block_tables: int32 [R, max_blocks]. seq_lens: int32 [R], query tokens included. items, num_items: one
    window's part of the `AttentionWork` for this plan and these query tokens. weights: shape, window, head norms,
    score_cap, kv_scales and first position. queries: most query tokens of a row, 1 to MAX_QUERIES, 1 if the first
    position is not 0. query_start_loc: int32 [R + 1], required if a row may have several query tokens; query tokens
    before position 0 get zeros, those of no row nothing. ragged: a mixed launch, split as such: rows with another
    number of query tokens than one get nothing.
    """
    assert 1 <= queries <= MAX_QUERIES and ((queries == 1 and not ragged) or query_start_loc is not None)
    assert queries == 1 or not ragged, "no row of a mixed launch verifies drafts"
    assert not weights.first or queries == 1, "no draft head has several"
    rows, block_size, shape = seq_lens.shape[0], keys.shape[1], weights.shape
    q_norm, k_norm = weights.q_norm, weights.k_norm
    dim_pad = max(triton.next_power_of_2(shape.head_dim), 16)
    group, queries = shape.heads // shape.kv_heads, triton.next_power_of_2(queries)
    share = share_of(queries, group, shape.head_dim, plan.share)
    lines = max(triton.next_power_of_2(group * share), 16)
    warps = plan.warps if queries == 1 else max(plan.warps, _WARPS_OF_SEVERAL)
    # Triton reorders the columns of FP8 tiles inside a loop but not before it, which would change the order of sums.
    early = plan.early and not (plan.exact and weights.kv_scales is not None)
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _decode_kernel[(plan.programs,)](
        qkv,
        keys,
        values,
        weights.kv_scales,
        block_tables,
        seq_lens if query_start_loc is None else query_start_loc,
        items,
        num_items,
        rope.cos,
        rope.sin,
        qkv if q_norm is None else q_norm.weight,
        qkv if k_norm is None else k_norm.weight,
        out,
        buffers.partial,
        buffers.top,
        buffers.total,
        buffers.arrived,
        shape.scale * LOG2_E,
        0.0 if q_norm is None else q_norm.eps,
        block_tables.stride(0),
        rows,
        rope.cos.shape[0],
        Q_HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=weights.window,
        TILE=plan.tile,
        QUERIES=queries,
        SHARE=share,
        LINES=lines,
        PART_LINES=buffers.partial.shape[1],
        DIM_PAD=dim_pad,
        PARTS=parts_at_a_time(buffers, dim_pad, warps),
        STAGES=plan.stages if early or not plan.early else _LATE_STAGES,
        EARLY=plan.chunk if early else 0,
        EXACT=plan.exact,
        GROUP_PARTS=MAX_PARTS if plan.grouped else plan.group,
        HAS_NORM=q_norm is not None,
        CAP=weights.score_cap * LOG2_E,
        DEPENDENT=dependent,
        SINCE=weights.first,
        RAGGED=ragged,
        num_warps=warps,
        enable_fp_fusion=not plan.exact,
        **options,
    )
