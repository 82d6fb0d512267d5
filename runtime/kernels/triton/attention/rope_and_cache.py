"""Head norms, rotary embedding and the write into the paged cache, between the QKV product and attention."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Norm
from runahead.runtime.kernels.triton.attention.kv_dtype import as_kept, head_scales


@triton.jit
def _normed(low, high, norm, i, inside, eps, HEAD_DIM: tl.constexpr):
    """Normalize a head over its two halves, [heads, D / 2]."""
    square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
    low_weight = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    high_weight = tl.load(norm + HEAD_DIM // 2 + i, mask=inside, other=0.0).to(tl.float32)
    return low * scale * low_weight[None, :], high * scale * high_weight[None, :]


@triton.jit
def _rotate_and_write_kernel(
    qkv, norms, rope, positions, slot_mapping, q_out, keys, values, kv_scales, num_positions, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Process one token and KV head: its key and value, and its query heads, if there are any. norms: weights of
    queries and keys, and eps. rope: cosines and sines.
    """
    q_norm, k_norm, eps = norms
    cos, sin = rope
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    # A masked token's position may be anything; keep the load inside the table.
    position = tl.minimum(tl.maximum(tl.load(positions + token), 0), num_positions - 1)
    slot = tl.load(slot_mapping + token)
    i = tl.arange(0, HALF_PAD)
    inside = i < HALF
    c = tl.load(cos + position * HALF + i, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + position * HALF + i, mask=inside, other=0.0).to(tl.float32)[None, :]
    row = qkv + token * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM

    if GROUP > 0:
        g = tl.arange(0, GROUP_PAD)
        head = kv_head * GROUP + g
        ok = (g < GROUP)[:, None] & inside[None, :]
        at = head[:, None] * HEAD_DIM + i[None, :]
        low = tl.load(row + at, mask=ok, other=0.0).to(tl.float32)
        high = tl.load(row + at + HALF, mask=ok, other=0.0).to(tl.float32)
        if q_norm is not None:
            low, high = _normed(low, high, q_norm, i, inside, eps, HEAD_DIM)
        q_row = q_out + token * Q_HEADS * HEAD_DIM
        tl.store(q_row + at, (low * c - high * s).to(q_out.dtype.element_ty), mask=ok)
        tl.store(q_row + at + HALF, (high * c + low * s).to(q_out.dtype.element_ty), mask=ok)

    one = tl.arange(0, 1)[:, None]
    k_at = (Q_HEADS + kv_head + one) * HEAD_DIM + i[None, :]
    k_ok = (one == 0) & inside[None, :]
    low = tl.load(row + k_at, mask=k_ok, other=0.0).to(tl.float32)
    high = tl.load(row + k_at + HALF, mask=k_ok, other=0.0).to(tl.float32)
    if k_norm is not None:
        low, high = _normed(low, high, k_norm, i, inside, eps, HEAD_DIM)
    v_low = tl.load(row + k_at + KV_HEADS * HEAD_DIM, mask=k_ok, other=0.0)
    v_high = tl.load(row + k_at + KV_HEADS * HEAD_DIM + HALF, mask=k_ok, other=0.0)
    out = (slot * KV_HEADS + kv_head + one) * HEAD_DIM + i[None, :]
    key_scale, value_scale = head_scales(kv_scales, kv_head, KV_HEADS)
    dtype: tl.constexpr = keys.dtype.element_ty
    tl.store(keys + out, as_kept(low * c - high * s, key_scale, kv_scales, dtype), mask=k_ok)
    tl.store(keys + out + HALF, as_kept(high * c + low * s, key_scale, kv_scales, dtype), mask=k_ok)
    tl.store(values + out, as_kept(v_low, value_scale, kv_scales, dtype), mask=k_ok)
    tl.store(values + out + HALF, as_kept(v_high, value_scale, kv_scales, dtype), mask=k_ok)


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_heads: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize heads if there is a norm, rotate queries and keys (half-split convention), and write the cache.

    qkv: contiguous [T, (q_heads + 2 * kv_heads) * D], queries, keys and values; q_heads may be 0. cos, sin: [positions,
        D // 2]. positions, slot_mapping: int64 [T]; a masked token's slot is in the null block. keys, values: one
        layer's [num_blocks, block_size, kv_heads, D]. q_norm, k_norm: over D, both or neither, with the same eps.
    kv_scales: for FP8, float32 [2, kv_heads]; None: the cache has qkv's dtype. Returns the queries, [T, q_heads, D].
    """
    tokens = qkv.shape[0]
    kv_heads, head_dim = keys.shape[2], keys.shape[3]
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rotate_and_write_kernel[(tokens, kv_heads)](
        qkv,
        (None, None, None) if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps),
        (cos, sin),
        positions,
        slot_mapping,
        q if q_heads else qkv,
        keys,
        values,
        kv_scales,
        cos.shape[0],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        GROUP_PAD=triton.next_power_of_2(max(q_heads // kv_heads, 1)),
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
    return q
