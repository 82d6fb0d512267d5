"""Attention of decode rows over the paged cache: the context is split, the splits are combined in order.

The size of a split is fixed for an engine, so a row's bits do not depend on how many rows, or which, share its launch.
Source: Flash-Decoding (Dao et al., 2023), with the online softmax of Milakov and Gimelshein (2018) inside a split.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634
MAX_SPLITS: Final = 32
MIN_SPLIT_TOKENS: Final = 128
TILE: Final = 64  # tokens a program holds at a time
WARPS: Final = 2


def split_tokens(context_length: int) -> int:
    """Tokens of one split: a power of two, so large that no row of `context_length` has over MAX_SPLITS of them."""
    return int(max(MIN_SPLIT_TOKENS, triton.next_power_of_2(triton.cdiv(context_length, MAX_SPLITS))))


@triton.jit
def _split_kernel(
    q,
    keys,
    values,
    block_tables,
    seq_lens,
    partial,
    partial_max,
    partial_sum,
    scale,
    table_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """One program for a row, a KV head and a split: softmax over the split's tokens, unnormalised."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    seq_len = tl.load(seq_lens + row)
    begin = split * SPLIT_TOKENS
    end = tl.minimum(begin + SPLIT_TOKENS, seq_len)
    if WINDOW > 0:
        begin = tl.maximum(begin, (seq_len - WINDOW) // TILE_TOKENS * TILE_TOKENS)
    if begin >= end:
        return
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    t = tl.arange(0, TILE_TOKENS)
    in_dim = d < HEAD_DIM
    head = kv_head * GROUP + g
    q_ok = (g < GROUP)[:, None] & in_dim[None, :]
    query = tl.load(q + (row * Q_HEADS + head[:, None]) * HEAD_DIM + d[None, :], mask=q_ok, other=0.0)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for first in range(begin, end, TILE_TOKENS):
        token = first + t
        ok = token < end
        if WINDOW > 0:
            ok = ok & (token >= seq_len - WINDOW)
        block = tl.load(block_tables + row * table_stride + token // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        at = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        kv_ok = ok[:, None] & in_dim[None, :]
        key = tl.load(keys + at[:, None] + d[None, :], mask=kv_ok, other=0.0)
        value = tl.load(values + at[:, None] + d[None, :], mask=kv_ok, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(ok[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A tile in which the window hides every token leaves the maximum at -inf; -inf - -inf would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - shift[:, None])
        old = tl.exp2(top - shift)
        total = total * old + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * old[:, None], input_precision="ieee")
        top = new_top
    at = (row * Q_HEADS + head) * SPLITS + split
    tl.store(partial + at[:, None] * HEAD_DIM + d[None, :], acc, mask=q_ok)
    tl.store(partial_max + at, top, mask=g < GROUP)
    tl.store(partial_sum + at, total, mask=g < GROUP)


@triton.jit
def _combine_kernel(
    partial,
    partial_max,
    partial_sum,
    seq_lens,
    out,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """One program for a row and a query head: the splits that hold its tokens, weighed and added in order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    s = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, DIM_PAD)
    used = s * SPLIT_TOKENS < seq_len
    if WINDOW > 0:
        used = used & ((s + 1) * SPLIT_TOKENS > seq_len - WINDOW)
    at = (row * Q_HEADS + head) * SPLITS + s
    top = tl.load(partial_max + at, mask=used, other=float("-inf"))
    total = tl.load(partial_sum + at, mask=used, other=0.0)
    best = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    ok = used[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.load(partial + at[:, None] * HEAD_DIM + d[None, :], mask=ok, other=0.0)
    denominator = tl.sum(total * weight, 0)
    value = tl.sum(acc * weight[:, None], 0) / tl.where(denominator > 0.0, denominator, 1.0)
    # A NaN among the scores must reach the row's logits, where S reports it; a masked row (length 0) gets zeros.
    value = tl.where(seq_len > 0, value, 0.0)
    value = tl.where(denominator != denominator, denominator, value)
    tl.store(out + (row * Q_HEADS + head) * HEAD_DIM + d, value.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    context_length: int,
) -> torch.Tensor:
    """Attention of one query a row. Lengths and block tables are read on the device; the grid depends on shapes alone.

    q: contiguous [B, q_heads, D]. keys, values: one layer's [num_blocks, block_size, kv_heads, D]. block_tables: int32
    [B, max_blocks]. seq_lens: int32 [B], the query included; 0 gives zeros. window: tokens a query sees, itself
    included; 0: all. context_length: most tokens any row of this engine can have. Returns [B, q_heads, D].

    Rows with several queries are for `chunk_attention`: raises ValueError where there are not as many queries as rows.
    """
    rows, q_heads, head_dim = q.shape
    if rows != seq_lens.shape[0]:
        raise ValueError(
            f"decode_attention takes one query a row: {rows} queries were given for {seq_lens.shape[0]} rows; "
            "chunk_attention takes several"
        )
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    size = split_tokens(context_length)
    splits = triton.cdiv(context_length, size)
    partial = torch.empty((rows, q_heads, splits, head_dim), dtype=torch.float32, device=q.device)
    top = torch.empty((rows, q_heads, splits), dtype=torch.float32, device=q.device)
    total = torch.empty_like(top)
    out = torch.empty_like(q)
    dim_pad = max(triton.next_power_of_2(head_dim), 16)
    _split_kernel[(rows, kv_heads, splits)](
        q,
        keys,
        values,
        block_tables,
        seq_lens,
        partial,
        top,
        total,
        scale * LOG2_E,
        block_tables.stride(0),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SPLITS=splits,
        SPLIT_TOKENS=size,
        TILE_TOKENS=TILE,
        GROUP_PAD=max(triton.next_power_of_2(q_heads // kv_heads), 16),
        DIM_PAD=dim_pad,
        num_warps=WARPS,
    )
    _combine_kernel[(rows, q_heads)](
        partial,
        top,
        total,
        seq_lens,
        out,
        Q_HEADS=q_heads,
        HEAD_DIM=head_dim,
        WINDOW=window,
        SPLITS=splits,
        SPLIT_TOKENS=size,
        SPLITS_PAD=triton.next_power_of_2(splits),
        DIM_PAD=dim_pad,
        num_warps=2,
    )
    return out
