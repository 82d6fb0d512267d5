"""Partial results of split-KV attention and their reduction."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.attention.schedule import MAX_PARTS, AttentionPlan
from runahead.runtime.kernels.triton.gpu.unrolled import longer
from runahead.runtime.rounding import ceil_div

_PARTS: Final = 16  # most sums of a row that are added at a time
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
def no_part(LINES: tl.constexpr, DIM_PAD: tl.constexpr):
    """Return an empty sum: maxima and totals, [lines], and sums, [lines, D]."""
    top = tl.full([LINES], float("-inf"), tl.float32)
    return top, tl.zeros([LINES], tl.float32), tl.zeros([LINES, DIM_PAD], tl.float32)


@triton.jit
def leave_part(parts, at, top, total, acc, ok, HEAD_DIM: tl.constexpr, PART_LINES: tl.constexpr, DIM_PAD: tl.constexpr):
    """Store a part for `add_parts`. at: its index. ok: which of its lines exist, [lines]."""
    d = tl.arange(0, DIM_PAD)
    mine = at * PART_LINES + tl.arange(0, ok.shape[0])
    tl.store(parts.partial + mine[:, None] * HEAD_DIM + d[None, :], acc, mask=ok[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(parts.top + mine, top, mask=ok)
    tl.store(parts.total + mine, total, mask=ok)


@triton.jit
def add_parts(
    parts, out, value_scale, begin_sums, sums, group_sums, token, kv_head, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PART_LINES: tl.constexpr, DIM_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Weigh and add the sums of a row and a KV head one by one in groups of group_sums, then the groups' sums. PARTS of
    them are requested together.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    line = tl.arange(0, PART_LINES)
    d = tl.arange(0, DIM_PAD)
    head, line_ok = kv_head * GROUP + line, line < GROUP
    top, total, acc = no_part(PART_LINES, DIM_PAD)
    for first in range(0, sums, group_sums):
        in_group = tl.minimum(sums - first, group_sums)
        group_top, group_total, group_acc = no_part(PART_LINES, DIM_PAD)
        for begin in range(0, in_group, PARTS):
            tops, totals, accs = (), (), ()
            for i in tl.static_range(PARTS):
                at = ((begin_sums + first + begin + i) * KV_HEADS + kv_head) * PART_LINES + line
                ok = line_ok & (begin + i < in_group)  # parts that do not exist are empty
                there = ok[:, None] & (d < HEAD_DIM)[None, :]
                where = at[:, None] * HEAD_DIM + d[None, :]
                tops = longer(tops, tl.load(parts.top + at, mask=ok, other=float("-inf"), cache_modifier=".cg"))
                totals = longer(totals, tl.load(parts.total + at, mask=ok, other=0.0, cache_modifier=".cg"))
                accs = longer(accs, tl.load(parts.partial + where, mask=there, other=0.0, cache_modifier=".cg"))
            for i in tl.static_range(PARTS):
                group_top, group_total, group_acc = with_part(
                    group_top, group_total, group_acc, tops[i], totals[i], accs[i]
                )
        top, total, acc = with_part(top, total, acc, group_top, group_total, group_acc)
    # `maximum` ignores NaN: a part with a NaN has a NaN total, by which everything is divided.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    out_at = (token.to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=line_ok[:, None] & (d < HEAD_DIM)[None, :])


class PartBuffers(NamedTuple):
    """Partial results of split rows. One attention at a time uses them."""

    partial: torch.Tensor  # float32 [sums, lines, head_dim]
    top: torch.Tensor  # float32 [sums, lines]
    total: torch.Tensor  # float32 [sums, lines]
    arrived: torch.Tensor  # int32 [rows * kv_heads], zero between attentions


def make_part_buffers(
    rows: int, shape: AttentionShape, plan: AttentionPlan, context_length: int, device: torch.device,
    rooms: dict[str, torch.Tensor] | None = None,
) -> PartBuffers:  # fmt: skip
    """Make buffers for `rows` rows of at most `context_length` tokens. rooms: reusable memory by name that no
    concurrent attention uses: large enough entries are used, others replaced. The owner of views keeps the old memory
    alive.
    """
    lines = triton.next_power_of_2(shape.heads // shape.kv_heads)
    sums = plan.sums(rows, context_length) * shape.kv_heads
    rooms = {} if rooms is None else rooms

    def room(name: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        count = math.prod(sizes)
        if name not in rooms or rooms[name].numel() < count:
            rooms[name] = torch.zeros(count, dtype=dtype, device=device)
        return rooms[name][:count].view(sizes)

    return PartBuffers(
        partial=room("partial", torch.float32, sums, lines, shape.head_dim),
        top=room("top", torch.float32, sums, lines),
        total=room("total", torch.float32, sums, lines),
        arrived=room("arrived", torch.int32, rows * shape.kv_heads),
    )


def parts_at_a_time(buffers: PartBuffers, dim_pad: int, plan: AttentionPlan, rows: int) -> int:
    """Return how many sums a program keeps in registers while adding. dim_pad: padded head size. rows: of a launch."""
    most = min(_PARTS, plan.group) if plan.spreads(rows) else ceil_div(MAX_PARTS, plan.group)  # parts, or groups
    return max(1, min(most, 32 * plan.warps * _PARTS_WORDS // (buffers.partial.shape[1] * dim_pad)))
