"""Attention of decode rows, in one kernel: what comes before it (head norms, rotation, the write of the new key and
value) and the adding up of a row's parts are in it.

A row's tiles of tokens are cut into items by `decode_work`. A program takes one item after the other: some tiles of one
row, for one KV head and the query heads that read it. Where a row is one item, its result is written at once; otherwise
each item leaves its part, and the program that comes last adds them up in order.

Source: Flash-Decoding (Dao et al., 2023), with the online softmax of Milakov and Gimelshein (2018) over an item's
tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Attention, AttentionShape, RopeTable
from runahead.runtime.kernels.triton.decode_work import AttentionPlan
from runahead.runtime.kernels.triton.dependent_launch import let_dependents_start, wait_for_predecessors

LOG2_E: Final = 1.4426950408889634
_PARTS: Final = 16  # parts of a row that are added up at a time, at most
_PARTS_WORDS: Final = 8192  # float32 numbers of theirs that a program holds meanwhile


@triton.jit
def _rotated_head(
    at, ok, norm, cos, sin, position, eps, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Heads that begin at `at`, [n, 1], normalised where the model does so, then rotated: float32 [n, DIM_PAD]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, DIM_PAD)
    partner = tl.where(d < HALF, d + HALF, d - HALF)  # each entry is rotated with that of the other half
    ok = ok & (d < HEAD_DIM)[None, :]
    x = tl.load(at + d[None, :], mask=ok, other=0.0).to(tl.float32)
    y = tl.load(at + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * scale * tl.load(norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        y = y * scale * tl.load(norm + partner, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    angle = position * HALF + tl.where(d < HALF, d, d - HALF)
    c = tl.load(cos + angle, mask=d < HEAD_DIM, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=d < HEAD_DIM, other=0.0)[None, :]
    return x * c + tl.where(d < HALF, -1.0, 1.0)[None, :] * (y * s)


@triton.jit
def _item(
    item, starts, chunk, seq_lens, ends, all_items, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr
):
    """What an item is: its row, the row's length, its first token and the one after its last, the row's items. Of no
    item, where there is none any more: no tokens."""
    place = tl.minimum(item, all_items - 1) // KV_HEADS
    row = tl.sum((ends <= place).to(tl.int32), 0)
    before = tl.load(starts + row)
    parts = tl.load(starts + row + 1) - before
    tiles = tl.load(chunk + row)
    seq_len = tl.load(seq_lens + row)
    hidden = 0
    if WINDOW > 0:
        hidden = tl.maximum(seq_len - WINDOW, 0) // TILE
    first = (hidden + (place - before) * tiles) * TILE
    end = tl.minimum(first + tiles * TILE, seq_len)
    return row, seq_len, first, tl.where(item < all_items, end, first), before, parts


@triton.jit
def _tile(
    first, end, seq_len, kv_head, keys, values, table, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Keys and values of the tokens from `first` on, up to `end` and without the newest; which of them are seen."""
    token = first + tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    seen = token < tl.minimum(end, seq_len - 1)
    if WINDOW > 0:
        seen = seen & (token >= seq_len - WINDOW)
    block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    at = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    ok = seen[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(keys + at, mask=ok, other=0.0), tl.load(values + at, mask=ok, other=0.0), seen


@triton.jit
def _fold(query, key, value, seen, scale, top, total, acc):
    """One tile more in an item's softmax."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    score = tl.where(seen[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # A tile in which every token is hidden leaves the maximum at -inf; -inf - -inf would be NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - shift[:, None])
    kept = tl.exp2(top - shift)
    total = total * kept + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(
    qkv, keys, values, block_tables, seq_lens, starts, chunk, cos, sin, q_norm, k_norm, out, partial, partial_top,
    partial_total, arrived, scale, eps, table_stride, num_rows, num_positions, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, GROUP_PAD: tl.constexpr, PART_GROUP: tl.constexpr,
    DIM_PAD: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """EARLY: an item's first tile is asked for early, before the wait for the program's first item, and while the item
    before is finished for the others."""
    let_dependents_start(DEPENDENT)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    r = tl.arange(0, ROWS)
    ends = tl.load(starts + 1 + r, mask=r < num_rows, other=0x7FFFFFFF)
    all_items = tl.load(starts + num_rows) * KV_HEADS
    d = tl.arange(0, DIM_PAD)
    g = tl.arange(0, GROUP_PAD)
    one = tl.arange(0, 1)[:, None]
    in_dim = d < HEAD_DIM
    # Lengths, tables and older keys are constant during F.
    begin = tl.program_id(0)
    row, seq_len, first_token, end, before, parts = _item(
        begin, starts, chunk, seq_lens, ends, all_items, KV_HEADS, WINDOW, TILE
    )
    if EARLY:
        key, value, seen = _tile(
            first_token, end, seq_len, begin % KV_HEADS, keys, values, block_tables + row.to(tl.int64) * table_stride,
            BLOCK_SIZE, KV_HEADS, HEAD_DIM, WINDOW, TILE, DIM_PAD,
        )  # fmt: skip
    wait_for_predecessors(DEPENDENT)
    step = tl.num_programs(0)
    for item in range(begin, all_items, step):
        kv_head = item % KV_HEADS
        position = tl.minimum(tl.maximum(seq_len - 1, 0), num_positions - 1)
        line = qkv + row.to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
        table = block_tables + row.to(tl.int64) * table_stride
        head = kv_head * GROUP + g
        query = _rotated_head(
            line + head[:, None] * HEAD_DIM, (g < GROUP)[:, None], q_norm, cos, sin, position, eps, HEAD_DIM, DIM_PAD,
            HAS_NORM,
        ).to(keys.dtype.element_ty)  # fmt: skip
        top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        if (end == seq_len) & (end > first_token):
            # The item that ends the row has the newest token. Its key and value go into the cache, and into the softmax
            # by themselves: in a tile they would have to be put among keys that come straight from memory.
            new_key = _rotated_head(
                line + (Q_HEADS + kv_head + one) * HEAD_DIM, one == 0, k_norm, cos, sin, position, eps, HEAD_DIM,
                DIM_PAD, HAS_NORM,
            ).to(keys.dtype.element_ty)  # fmt: skip
            new_value = tl.load(line + (Q_HEADS + KV_HEADS + kv_head) * HEAD_DIM + d, mask=in_dim, other=0.0)
            new_value = new_value.to(values.dtype.element_ty)
            home = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            cell = ((home * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
            tl.store(keys + cell + d[None, :] + one, new_key, mask=in_dim[None, :])
            tl.store(values + cell + d, new_value, mask=in_dim)
            top = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale
            total = tl.exp2(top - top)  # 1, or NaN where the score is not finite
            acc += new_value.to(tl.float32)[None, :]
        if EARLY:
            top, total, acc = _fold(query, key, value, seen, scale, top, total, acc)
        for first in tl.range(
            first_token + (TILE if EARLY else 0), tl.minimum(end, seq_len - 1), TILE, num_stages=STAGES
        ):
            k, v, ok = _tile(
                first, end, seq_len, kv_head, keys, values, table, BLOCK_SIZE, KV_HEADS, HEAD_DIM, WINDOW, TILE, DIM_PAD
            )
            top, total, acc = _fold(query, k, v, ok, scale, top, total, acc)

        out_ok = (g < GROUP)[:, None] & in_dim[None, :]
        if parts == 1:
            # A NaN among the scores must reach the row's logits, where S reports it; a masked row gets zeros.
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            out_at = (row.to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
            tl.store(out + out_at, result.to(out.dtype.element_ty), mask=out_ok)
        else:
            mine = item * PART_GROUP + g
            tl.store(partial + mine[:, None] * HEAD_DIM + d[None, :], acc, mask=out_ok)
            tl.store(partial_top + mine, top, mask=g < GROUP)
            tl.store(partial_total + mine, total, mask=g < GROUP)
            tl.debug_barrier()
            if tl.atomic_add(arrived + row * KV_HEADS + kv_head, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived + row * KV_HEADS + kv_head, 0)
                _add_parts(
                    partial, partial_top, partial_total, out, before, parts, row, kv_head, Q_HEADS, KV_HEADS, HEAD_DIM,
                    PART_GROUP, DIM_PAD, PARTS,
                )  # fmt: skip
        row, seq_len, first_token, end, before, parts = _item(
            item + step, starts, chunk, seq_lens, ends, all_items, KV_HEADS, WINDOW, TILE
        )
        if EARLY:
            key, value, seen = _tile(
                first_token, end, seq_len, (item + step) % KV_HEADS, keys, values,
                block_tables + row.to(tl.int64) * table_stride, BLOCK_SIZE, KV_HEADS, HEAD_DIM, WINDOW, TILE, DIM_PAD,
            )  # fmt: skip


@triton.jit
def _add_parts(
    partial, partial_top, partial_total, out, begin_items, parts, row, kv_head, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PART_GROUP: tl.constexpr, DIM_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The parts of a row and a KV head, weighed and added in order."""
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    p = tl.arange(0, PARTS)
    g = tl.arange(0, PART_GROUP)
    d = tl.arange(0, DIM_PAD)
    top = tl.full([PART_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PART_GROUP], tl.float32)
    acc = tl.zeros([PART_GROUP, DIM_PAD], tl.float32)
    for first in range(0, parts, PARTS):
        at = ((begin_items + first + p) * KV_HEADS + kv_head)[:, None] * PART_GROUP + g[None, :]
        ok = (first + p < parts)[:, None] & (g < GROUP)[None, :]
        part_top = tl.load(partial_top + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(partial_total + at, mask=ok, other=0.0, cache_modifier=".cg")
        where = at[:, :, None] * HEAD_DIM + d[None, None, :]
        loaded = tl.load(
            partial + where, mask=ok[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(part_top, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part_top - shift[None, :])
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(part_total * weight, 0)
        acc = acc * kept[:, None] + tl.sum(loaded * weight[:, :, None], 0)
        top = new_top
    # `maximum` passes a NaN over: a part that has one says so by its total, by which everything is divided.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = (row.to(tl.int64) * Q_HEADS + kv_head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :])


@dataclass(frozen=True, slots=True)
class PartBuffers:
    """Where the items of a split row meet. One attention at a time uses them."""

    partial: torch.Tensor  # float32 [items, group, head_dim]
    top: torch.Tensor  # float32 [items, group]
    total: torch.Tensor  # float32 [items, group]
    arrived: torch.Tensor  # int32 [rows * kv_heads], zero between attentions


def make_part_buffers(
    rows: int, shape: AttentionShape, plan: AttentionPlan, context_length: int, device: torch.device
) -> PartBuffers:
    """For launches of up to `rows` rows, of up to `context_length` tokens each."""
    items = rows * plan.parts(context_length) * shape.kv_heads
    group = triton.next_power_of_2(shape.heads // shape.kv_heads)
    return PartBuffers(
        partial=torch.zeros((items, group, shape.head_dim), dtype=torch.float32, device=device),
        top=torch.zeros((items, group), dtype=torch.float32, device=device),
        total=torch.zeros((items, group), dtype=torch.float32, device=device),
        arrived=torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=device),
    )


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    chunk: torch.Tensor,
    rope: RopeTable,
    weights: Attention,
    plan: AttentionPlan,
    buffers: PartBuffers,
    *,
    dependent: bool,
) -> None:
    """Write the new keys and values into the cache, and attention's result into `out`, for one query a row.

    qkv: contiguous [R or more, (heads + 2 * kv_heads) * D], queries, keys, values in order, neither normalised nor
    rotated. out: contiguous [R or more, heads * D]; zeros for rows of length 0. keys, values: one layer's [num_blocks,
    block_size, kv_heads, D]. block_tables: int32 [R, max_blocks]. seq_lens: int32 [R], the query included: the new
    token's position is one less, and so is its place in the block table. starts, chunk: int32 [R + 1] and [R], the work
    that `decode_work` has cut for this window and plan. weights: their shape, window and head norms count.
    """
    rows, block_size, shape = seq_lens.shape[0], keys.shape[1], weights.shape
    q_norm, k_norm = weights.q_norm, weights.k_norm
    dim_pad = max(triton.next_power_of_2(shape.head_dim), 16)
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _decode_kernel[(plan.programs,)](
        qkv,
        keys,
        values,
        block_tables,
        seq_lens,
        starts,
        chunk,
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
        ROWS=triton.next_power_of_2(rows),
        GROUP_PAD=max(triton.next_power_of_2(shape.heads // shape.kv_heads), 16),
        PART_GROUP=buffers.partial.shape[1],
        DIM_PAD=dim_pad,
        PARTS=max(1, min(_PARTS, _PARTS_WORDS // (buffers.partial.shape[1] * dim_pad))),
        STAGES=plan.stages,
        EARLY=plan.early,
        HAS_NORM=q_norm is not None,
        DEPENDENT=dependent,
        num_warps=plan.warps,
        **options,
    )
