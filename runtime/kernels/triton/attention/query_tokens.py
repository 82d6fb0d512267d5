"""The query token of a decode row. A program handles the query heads of one KV head: the *lines* of its tile."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.ops.softcap import bounded

LOG2_E: Final = 1.4426950408889634


@triton.jit
def partner_of(d, HEAD_DIM: tl.constexpr):
    """Return each entry's rotation partner in the other half of the head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    return tl.where(d < HALF, d + HALF, d - HALF)


@triton.jit
def norm_of_head(norm, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Load a head norm's weights and each entry's partner's: float32 [DIM_PAD] each, if there is a norm."""
    weight = 0.0
    of_partner = 0.0
    if norm is not None:
        d = tl.arange(0, DIM_PAD)
        weight = tl.load(norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        of_partner = tl.load(norm + partner_of(d, HEAD_DIM), mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    return weight, of_partner


@triton.jit
def head_and_partner(at, ok, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Load the heads that begin at `at`, [n, 1], and each entry's partner: [n, DIM_PAD] each."""
    d = tl.arange(0, DIM_PAD)
    ok = ok & (d < HEAD_DIM)[None, :]
    x = tl.load(at + d[None, :], mask=ok, other=0.0)
    return x, tl.load(at + partner_of(d, HEAD_DIM)[None, :], mask=ok, other=0.0)


@triton.jit
def rotated_head(
    x, y, weight, of_partner, c, s, eps, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr
):  # fmt: skip
    """Normalize heads and partners, if the model does so, and rotate them: float32 [n, DIM_PAD]."""
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if eps is not None:
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
def softmax_step(score, factor, top, total, MASKED: tl.constexpr):
    """Add a tile's scores, times `factor`, to the online softmax: returns the tile's weights, the factor of earlier
    sums, the maxima and the totals. MASKED: a line may see no token of the tiles so far.
    """
    new_top = tl.maximum(top, tl.max(score, 1) * factor)
    shift = new_top
    if MASKED:  # the maximum may be -inf; -inf - -inf would be NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score * factor - shift[:, None])
    kept = tl.exp2(top - shift)
    return weight, kept, new_top, total * kept + tl.sum(weight, 1)


@triton.jit
def fold(query, key, value, seen, scale, top, total, acc, CAP: tl.constexpr):
    """Fold one tile of tokens into the online softmax. seen: [1 or lines, tokens]. key, value: in the cache's
    dtype. CAP: the scores' bound times LOG2_E; 0: none.
    """
    key = key.to(query.dtype)
    value = value.to(query.dtype)
    score = bounded(tl.dot(query, tl.trans(key), input_precision="ieee") * scale, CAP)
    score = tl.where(seen, score, float("-inf"))
    weight, kept, top, total = softmax_step(score, 1.0, top, total, True)
    acc = tl.dot(weight.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return top, total, acc
