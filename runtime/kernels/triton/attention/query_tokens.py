"""Query tokens of decode rows: one a row, or up to eight if a row verifies drafts.

A program handles some query heads of some query tokens of a row, for one KV head. Each such pair is a *line* of its
tile; with one query token the lines are the query heads. Code for several query tokens depends on the compile-time
constant QUERIES.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.attention.kv_dtype import as_kept
from runahead.runtime.kernels.triton.ops.softcap import bounded

LOG2_E: Final = 1.4426950408889634
MAX_QUERIES: Final = 8  # of a row in a decode launch
_MAX_SUMS: Final = 8192  # float32 sums of a program's lines, if rows may have several query tokens
_NEW_TILE = tl.constexpr(16)  # fewest tokens for the matrix units; a row has at most MAX_QUERIES new ones


def share_of(queries: int, group: int, head_dim: int, most: int = 0) -> int:
    """Return how many query tokens of a row a program handles: all, or `most` if not 0, or fewer if there would be too
    many lines. queries, most: powers of two. group: query heads of a KV head.
    """
    share = min(queries, most) if most else queries
    while share > 1 and triton.next_power_of_2(share * group) * triton.next_power_of_2(head_dim) > _MAX_SUMS:
        share //= 2
    return share


@triton.jit
def queries_of(row, query_start_loc, QUERIES: tl.constexpr, RAGGED: tl.constexpr):
    """Return a row's first query token and their number. If each row has one, its index is the row's. RAGGED: other
    rows of the launch have several, and this one has one.
    """
    first = row
    count = 1
    if RAGGED:
        first = tl.load(query_start_loc + row)
    if QUERIES > 1:
        first = tl.load(query_start_loc + row)
        count = tl.load(query_start_loc + row + 1) - first
    return first, count


@triton.jit
def lines_of(
    share, kv_head, count, LINES: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SHARE: tl.constexpr
):
    """Return the lines of the tile with a row's query tokens from `share` * SHARE on: query token in the row (0 if it
    has one), query head and validity, [LINES] each.
    """
    line = tl.arange(0, LINES)
    query = 0
    head = kv_head * GROUP + line
    ok = line < GROUP
    if QUERIES > 1:
        query = share * SHARE + line // GROUP
        head = kv_head * GROUP + line % GROUP
        ok = (line < SHARE * GROUP) & (query < count)
    return query, head, ok


@triton.jit
def partner_of(d, HEAD_DIM: tl.constexpr):
    """Return each entry's rotation partner in the other half of the head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    return tl.where(d < HALF, d + HALF, d - HALF)


@triton.jit
def norm_of_head(norm, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_NORM: tl.constexpr):
    """Load a head norm's weights and each entry's partner's: float32 [DIM_PAD] each, if there is a norm."""
    weight = 0.0
    of_partner = 0.0
    if HAS_NORM:
        d = tl.arange(0, DIM_PAD)
        weight = tl.load(norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        of_partner = tl.load(norm + partner_of(d, HEAD_DIM), mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    return weight, of_partner


@triton.jit
def angle_of(cos, sin, position, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SEVERAL: tl.constexpr):
    """Load the rotation's cosine and sine of a head's entries: float32 [1 or n, DIM_PAD]. position: a scalar, or [n] if
    SEVERAL.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, DIM_PAD)
    angle = tl.where(d < HALF, d, d - HALF)[None, :]
    if SEVERAL:
        angle += position[:, None] * HALF
    else:
        angle += position * HALF
    c = tl.load(cos + angle, mask=(d < HEAD_DIM)[None, :], other=0.0)
    return c, tl.load(sin + angle, mask=(d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def head_and_partner(at, ok, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Load the heads that begin at `at`, [n, 1], and each entry's partner: [n, DIM_PAD] each."""
    d = tl.arange(0, DIM_PAD)
    ok = ok & (d < HEAD_DIM)[None, :]
    x = tl.load(at + d[None, :], mask=ok, other=0.0)
    return x, tl.load(at + partner_of(d, HEAD_DIM)[None, :], mask=ok, other=0.0)


@triton.jit
def rotated_head(
    x, y, weight, of_partner, c, s, eps, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Normalize heads and partners, if the model does so, and rotate them: float32 [n, DIM_PAD]."""
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * scale * weight[None, :]
        y = y * scale * of_partner[None, :]
    d = tl.arange(0, DIM_PAD)
    return x * c + tl.where(d < HEAD_DIM // 2, -1.0, 1.0)[None, :] * (y * s)


@triton.jit
def repeated_lines(x, LINES: tl.constexpr):
    """Repeat lines up to the matrix units' minimum: [LINES, ...]. Line n is x's line n % x's lines, so unused lines
    cost no separate loads.
    """
    TIMES: tl.constexpr = LINES // x.shape[0]
    if TIMES > 1:
        if len(x.shape) == 1:
            x = tl.reshape(tl.broadcast_to(x[None, :], [TIMES, x.shape[0]]), [LINES])
        else:
            x = tl.reshape(tl.broadcast_to(x[None, :, :], [TIMES, x.shape[0], x.shape[1]]), [LINES, x.shape[1]])
    return x


@triton.jit
def fold(query, key, value, seen, scale, top, total, acc, CAP: tl.constexpr):
    """Fold one tile of tokens into the online softmax. seen: [1, tokens], or [lines, tokens] if lines differ. key,
    value: in the cache's dtype. CAP: the scores' bound times LOG2_E; 0: none.
    """
    key = key.to(query.dtype)
    value = value.to(query.dtype)
    score = bounded(tl.dot(query, tl.trans(key), input_precision="ieee") * scale, CAP)
    score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # A completely hidden tile leaves the maximum at -inf; -inf - -inf would be NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - shift[:, None])
    kept = tl.exp2(top - shift)
    total = total * kept + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def new_token_of(
    qkv, table, position, token, kv_head, here, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Load a row's only query token from the QKV projection: key, the key's partners, value; and its block. Loads
    nothing unless `here`.
    """
    one = tl.arange(0, 1)[:, None]
    d = tl.arange(0, DIM_PAD)
    line = qkv + token.to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    key, partner = head_and_partner(line + (Q_HEADS + kv_head + one) * HEAD_DIM, (one == 0) & here, HEAD_DIM, DIM_PAD)
    value = tl.load(line + (Q_HEADS + KV_HEADS + kv_head) * HEAD_DIM + d, mask=(d < HEAD_DIM) & here, other=0.0)
    return key, partner, value, tl.load(table + position // BLOCK_SIZE, mask=here, other=0).to(tl.int64)


@triton.jit
def fold_new_token(
    query, new_key, new_value, home, keys, values, kv_scales, key_scale, value_scale, position, scale, kv_head, acc,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM_PAD: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write a row's only query token into the cache, and begin the softmax with it. query: [lines, DIM_PAD]. acc:
    [lines, DIM_PAD].
    """
    one = tl.arange(0, 1)[:, None]
    d = tl.arange(0, DIM_PAD)
    in_dim = d < HEAD_DIM
    new_key = as_kept(new_key, key_scale, kv_scales, keys.dtype.element_ty)
    new_value = as_kept(new_value, value_scale, kv_scales, values.dtype.element_ty)
    cell = ((home * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    tl.store(keys + cell + d[None, :] + one, new_key, mask=in_dim[None, :])
    tl.store(values + cell + d, new_value, mask=in_dim)
    score = bounded(tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale, CAP)
    top = repeated_lines(score, acc.shape[0])
    total = tl.exp2(top - top)  # 1, or NaN for a non-finite score
    acc += new_value.to(tl.float32)[None, :]
    return top, total, acc


@triton.jit
def new_tokens_of(
    qkv, table, old_len, num_positions, first_query, count, kv_head, here, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Load all query tokens of a row from the QKV projection: keys, their partners, values, blocks, positions and
    validity. Tokens before position 0 are invalid: the row is shorter than its query tokens. Loads nothing unless
    `here`.
    """
    n = tl.arange(0, _NEW_TILE)
    d = tl.arange(0, DIM_PAD)
    position = old_len + n
    there = (n < count) & (position >= 0) & here
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    ok = there[:, None] & (d < HEAD_DIM)[None, :]
    line = qkv + (first_query + n).to(tl.int64)[:, None] * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    key, partner = head_and_partner(line + (Q_HEADS + kv_head) * HEAD_DIM, there[:, None], HEAD_DIM, DIM_PAD)
    value = tl.load(line + (Q_HEADS + KV_HEADS + kv_head) * HEAD_DIM + d[None, :], mask=ok, other=0.0)
    home = tl.load(table + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    return key, partner, value, home, position, there


@triton.jit
def fold_new_tokens(
    query, key, partner, value, home, position, there, keys, values, kv_scales, key_scale, value_scale, k_weight,
    k_of_partner, cos, sin, scale, eps, of_line, kv_head, writes, top, total, acc, KV_HEADS: tl.constexpr, HEAD_DIM:
    tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, DIM_PAD: tl.constexpr, HAS_NORM: tl.constexpr, CAP:
    tl.constexpr,
):  # fmt: skip
    """Write a row's query tokens (`new_tokens_of`) into the cache if the program `writes`, and fold them as one tile
    into the softmax. A query token sees itself and earlier ones. of_line: each line's query token, [lines].
    """
    n = tl.arange(0, _NEW_TILE)
    d = tl.arange(0, DIM_PAD)
    ok = there[:, None] & (d < HEAD_DIM)[None, :]
    c, s = angle_of(cos, sin, position, HEAD_DIM, DIM_PAD, True)
    new_key = rotated_head(key, partner, k_weight, k_of_partner, c, s, eps, HEAD_DIM, DIM_PAD, HAS_NORM)
    new_key = as_kept(new_key, key_scale, kv_scales, keys.dtype.element_ty)
    new_value = as_kept(value, value_scale, kv_scales, values.dtype.element_ty)
    cell = ((home * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(keys + cell, new_key, mask=ok & writes)
    tl.store(values + cell, new_value, mask=ok & writes)
    seen = there[None, :] & (n[None, :] <= of_line[:, None])
    if WINDOW > 0:
        seen = seen & (n[None, :] > (of_line - WINDOW)[:, None])
    # A weight of zero does not mask a non-finite value, and a draft must not spoil earlier tokens.
    bad = tl.max((tl.abs(new_value.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1) > 0
    new_value = tl.where(bad[:, None], 0.0, new_value.to(query.dtype)).to(query.dtype)
    top, total, acc = fold(query, new_key, new_value, seen, scale, top, total, acc, CAP)
    spoilt = tl.max((seen & bad[None, :]).to(tl.int32), 1) > 0
    return top, tl.where(spoilt, float("nan"), total), acc
