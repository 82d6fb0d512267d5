"""Partial results of split-KV attention and their reduction."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.attention.query_tokens import lines_of, share_of
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan
from runahead.runtime.kernels.triton.gpu.unrolled import longer

_PARTS: Final = 16  # most parts of a row that are added at a time
_PARTS_WORDS: Final = 96  # float32 numbers of theirs in a thread, unless one part has more


@triton.jit
def with_part(top, total, acc, part_top, part_total, part_acc):
    """Add one part to a sum of parts. To an empty sum it is that part to the bit."""
    new_top = tl.maximum(top, part_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept = tl.exp2(top - shift)
    weight = tl.exp2(part_top - shift)
    return new_top, total * kept + part_total * weight, acc * kept[:, None] + part_acc * weight[:, None]


@triton.jit
def _part_of(at, partial, partial_top, partial_total, ok, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Load a part: its maxima and totals, [lines], and sums, [lines, D]. at: of its lines. ok: which of them exist; the
    others are empty."""
    d = tl.arange(0, DIM_PAD)
    inside = ok[:, None] & (d < HEAD_DIM)[None, :]
    top = tl.load(partial_top + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(partial_total + at, mask=ok, other=0.0, cache_modifier=".cg")
    where = at[:, None] * HEAD_DIM + d[None, :]
    return top, total, tl.load(partial + where, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def add_parts(
    partial, partial_top, partial_total, out, value_scale, begin_items, parts, first_query, count, head_share, Q_HEADS:
    tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, SHARE: tl.constexpr,
    PART_LINES: tl.constexpr, DIM_PAD: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr, GROUP_PARTS:
    tl.constexpr,
):  # fmt: skip
    """Weigh and add the parts of a row and a KV head in order. EXACT: one by one in groups of GROUP_PARTS, then the
    groups' sums; the last group first, beginning with its last part.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    SHARES: tl.constexpr = QUERIES // SHARE
    HEADS: tl.constexpr = KV_HEADS * SHARES
    line = tl.arange(0, PART_LINES)
    d = tl.arange(0, DIM_PAD)
    of_line, head, line_ok = lines_of(
        head_share % SHARES, head_share // SHARES, count, PART_LINES, GROUP, QUERIES, SHARE
    )
    top = tl.full([PART_LINES], float("-inf"), tl.float32)
    total = tl.zeros([PART_LINES], tl.float32)
    acc = tl.zeros([PART_LINES, DIM_PAD], tl.float32)
    if EXACT:
        # The last group first, and in it the last part. Parts of a block are requested together.
        BLOCK: tl.constexpr = min(PARTS, GROUP_PARTS)
        last = (parts - 1) // GROUP_PARTS
        for g in range(last + 1):
            first = tl.where(g == 0, last, g - 1) * GROUP_PARTS
            in_group = tl.minimum(parts - first, GROUP_PARTS)
            group_top = tl.full([PART_LINES], float("-inf"), tl.float32)
            group_total = tl.zeros([PART_LINES], tl.float32)
            group_acc = tl.zeros([PART_LINES, DIM_PAD], tl.float32)
            for begin in range(0, in_group, BLOCK):
                tops, totals, accs = (), (), ()
                for i in tl.static_range(BLOCK):
                    p = begin + i
                    part = begin_items + first + tl.where(g > 0, p, tl.where(p == 0, in_group, p) - 1)
                    one_top, one_total, one = _part_of(
                        (part * HEADS + head_share) * PART_LINES + line, partial, partial_top, partial_total,
                        line_ok & (p < in_group), HEAD_DIM, DIM_PAD,
                    )  # fmt: skip
                    tops, totals, accs = longer(tops, one_top), longer(totals, one_total), longer(accs, one)
                for i in tl.static_range(BLOCK):
                    group_top, group_total, group_acc = with_part(
                        group_top, group_total, group_acc, tops[i], totals[i], accs[i]
                    )
            top, total, acc = with_part(top, total, acc, group_top, group_total, group_acc)
    else:
        # Part by part, so that each thread has the same elements of every part and no thread waits for another.
        for first in range(0, parts, PARTS):
            tops, totals, accs = (), (), ()
            for p in tl.static_range(PARTS):
                one_top, one_total, one = _part_of(
                    ((begin_items + first + p) * HEADS + head_share) * PART_LINES + line, partial, partial_top,
                    partial_total, line_ok & (first + p < parts), HEAD_DIM, DIM_PAD,
                )  # fmt: skip
                tops, totals, accs = longer(tops, one_top), longer(totals, one_total), longer(accs, one)
            new_top = top
            for p in tl.static_range(PARTS):
                new_top = tl.maximum(new_top, tops[p])
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            kept = tl.exp2(top - shift)
            total *= kept
            acc *= kept[:, None]
            for p in tl.static_range(PARTS):
                weight = tl.exp2(tops[p] - shift)
                total += totals[p] * weight
                acc += accs[p] * weight[:, None]
            top = new_top
    # `maximum` ignores NaN: a part with a NaN has a NaN total, by which everything is divided.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    out_at = ((first_query + of_line).to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=line_ok[:, None] & (d < HEAD_DIM)[None, :])


@dataclass(frozen=True, slots=True)
class PartBuffers:
    """Partial results of split rows. One attention at a time uses them."""

    partial: torch.Tensor  # float32 [items, lines, head_dim]
    top: torch.Tensor  # float32 [items, lines]
    total: torch.Tensor  # float32 [items, lines]
    arrived: torch.Tensor  # int32 [rows * kv_heads * shares], zero between attentions


def make_part_buffers(
    rows: int, shape: AttentionShape, plan: AttentionPlan, context_length: int, device: torch.device, queries: int = 1,
    rooms: dict[str, torch.Tensor] | None = None,
) -> PartBuffers:  # fmt: skip
    """Make buffers for `rows` rows of at most `context_length` tokens, `queries` of them query tokens. rooms: reusable
    memory by name that no concurrent attention uses: large enough entries are used, others replaced. The owner of views
    keeps the old memory alive.
    """
    group, queries = shape.heads // shape.kv_heads, triton.next_power_of_2(queries)
    share = share_of(queries, group, shape.head_dim, plan.share)
    heads, lines = shape.kv_heads * (queries // share), triton.next_power_of_2(group * share)
    items = rows * plan.parts(context_length) * heads
    rooms = {} if rooms is None else rooms

    def room(name: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        count = math.prod(sizes)
        if name not in rooms or rooms[name].numel() < count:
            rooms[name] = torch.zeros(count, dtype=dtype, device=device)
        return rooms[name][:count].view(sizes)

    return PartBuffers(
        partial=room("partial", torch.float32, items, lines, shape.head_dim),
        top=room("top", torch.float32, items, lines),
        total=room("total", torch.float32, items, lines),
        arrived=room("arrived", torch.int32, rows * heads),
    )


def parts_at_a_time(buffers: PartBuffers, dim_pad: int, warps: int) -> int:
    """Return how many parts a program of this many warps keeps in registers while adding. dim_pad: padded head size."""
    return max(1, min(_PARTS, 32 * warps * _PARTS_WORDS // (buffers.partial.shape[1] * dim_pad)))
