"""Assign a launch's tokens to experts on the device; output shapes are fixed.

One program a token turns the router's scores into experts and routing weights. Then one program an expert lists the
expert's tokens, ascending, and cuts the list into items: an expert and up to `block` of its tokens. For a few tokens
one program does everything. The number of items is the largest possible one, and unused items are marked, so a captured
graph is right for every choice and the host reads no count. Source of grouping tokens by expert in blocks: MegaBlocks
(Gale et al., 2022, arXiv:2211.15841).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.moe.topk import (
    IN_COPIES,
    choice_sizes,
    chosen_experts,
    numbers_of_experts,
    padded,
    routing_weights_of,
)
from runahead.runtime.rounding import ceil_div

ITEM: Final = 4  # int32 numbers of an item, 16 bytes: expert, index of its first entry, number of entries, unused
FEW_TOKENS: Final = 64  # with at most this many tokens, an item has LEAST_BLOCK of them
LEAST_BLOCK: Final = 16
MOST_CHOSEN: Final = 127  # experts of a token: an index among them is stored in 8 bits
_LISTED: Final = 1024  # tokens that a program lists at a time
_ITEMS_AT_ONCE: Final = 64
_TOGETHER: Final = 16  # most tokens that one program routes alone
_WARPS_TOGETHER: Final = 8
_ITEM, _AT_ONCE = tl.constexpr(ITEM), tl.constexpr(_ITEMS_AT_ONCE)


class Routing(NamedTuple):
    """The experts of T tokens. Each token has `chosen` entries, by ascending expert: token * chosen + index.

    block: entries of an item, at most.
    """

    routing_weights: torch.Tensor  # float32 [T * chosen], by entry; undefined for masked tokens
    entries: torch.Tensor  # int32 [experts, T], ascending for each expert; undefined behind the last
    items: torch.Tensor  # int32 [most items, ITEM] by ascending expert; unused ones have 0 entries
    scale: torch.Tensor  # float32 [T], of the previous norm if `route` was given its squares
    block: int


@triton.jit
def _write_items(counts, items, num_items, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the items: the first of every expert, then the second, and so on. Items that are left over get 0 entries.

    counts: int32 [PADDED], entries of each expert. items: int32 [num_items, ITEM].
    """
    e = tl.arange(0, PADDED)
    blocks = (counts + BLOCK - 1) // BLOCK
    ends = tl.cumsum(blocks, 0)
    for nth in range(0, tl.max(blocks, 0)):
        at, mine = items + (ends - blocks + nth) * _ITEM, nth < blocks
        tl.store(at, e, mask=mine)
        tl.store(at + 1, e * 0 + nth * BLOCK, mask=mine)
        tl.store(at + 2, tl.minimum(counts - nth * BLOCK, BLOCK), mask=mine)
    for begin in range(tl.sum(blocks, 0), num_items, _AT_ONCE):
        i = begin + tl.arange(0, _AT_ONCE)
        tl.store(items + i * _ITEM + 2, i * 0, mask=i < num_items)


@triton.jit(do_not_specialize=["num_tokens", "num_items"])
def _route_kernel(
    scores, correction, live, squares, routed, indexes, eps, num_tokens, num_items, CHOICE: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, SQUARES: tl.constexpr, ALL_SQUARES: tl.constexpr, STRIDE: tl.constexpr,
    LISTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose each token's experts and their weights, a token a program.

    scores: float32 [num_tokens, scores of a token]. indexes: int8 [num_tokens, COUNT], an expert's index among the
    token's experts, -1 if the token does not go there. LISTS: one program has all of up to COPIES tokens, and writes
    the lists of all experts instead. routed.scale: gets the scale of the norm before, if SQUARES.
    """
    let_dependents_start(DEPENDENT)
    t = tl.program_id(0) + tl.arange(0, CHOICE.COPIES)
    there = t < num_tokens
    token = tl.minimum(t, num_tokens - 1)[:, None]
    e = numbers_of_experts(CHOICE.PADDED, CHOICE.COPIES)
    wait_for_predecessors(DEPENDENT)
    # Issue all loads before the first use of one.
    is_live = tl.load(live + t, mask=there, other=0) > 0
    if SQUARES > 0:
        s = tl.arange(0, ALL_SQUARES)[:, None]
        of_tiles = tl.load(squares + s * STRIDE + t[None, :], mask=(s < SQUARES) & there[None, :], other=0.0)
    chosen, index, score = chosen_experts(scores, correction, token, CHOICE)
    weight = routing_weights_of(score, chosen, CHOICE)
    chosen = chosen & is_live[:, None]
    entry = token * CHOICE.CHOSEN + index
    tl.store(routed.routing_weights + entry, weight, mask=chosen)
    if LISTS:
        taken = chosen.to(tl.int32)
        nth = tl.cumsum(taken, 0) - 1
        tl.store(routed.entries + e * num_tokens + nth, entry, mask=taken > 0)
        _write_items(tl.sum(taken, 0), routed.items, num_items, CHOICE.PADDED, BLOCK)
    else:
        at = indexes + token.to(tl.int64) * CHOICE.COUNT + e
        tl.store(at, tl.where(chosen, index, -1).to(tl.int8), mask=e < CHOICE.COUNT)
    if SQUARES > 0:
        tl.store(routed.scale + t, tl.rsqrt(tl.sum(of_tiles, 0).to(tl.float32) / DEPTH + eps), mask=there)


@triton.jit(do_not_specialize=["num_tokens", "num_items"])
def _list_kernel(
    indexes, entries, counts, items, arrived, num_tokens, num_items, COUNT: tl.constexpr, CHOSEN: tl.constexpr,
    PADDED: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """List the entries of each expert, an expert a program; the program that ends last makes the items.

    indexes: int8 [num_tokens, COUNT], as `_route_kernel` leaves it. entries: int32 [COUNT, num_tokens]. counts: int32
    [COUNT]. arrived: int32 [1], 0, which it is again afterwards.
    """
    let_dependents_start(DEPENDENT)
    expert = tl.program_id(0)
    mine = entries + expert.to(tl.int64) * num_tokens
    count = 0
    wait_for_predecessors(DEPENDENT)
    for begin in range(0, num_tokens, LISTED):
        t = begin + tl.arange(0, LISTED)
        at = indexes + t.to(tl.int64) * COUNT + expert
        index = tl.load(at, mask=t < num_tokens, other=-1).to(tl.int32)
        taken = (index >= 0).to(tl.int32)
        tl.store(mine + count + tl.cumsum(taken, 0) - 1, t * CHOSEN + index, mask=index >= 0)
        count += tl.sum(taken, 0)
    tl.store(counts + expert, count)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == COUNT - 1:
        tl.store(arrived, 0)
        e = tl.arange(0, PADDED)
        found = tl.load(counts + e, mask=e < COUNT, other=0, cache_modifier=".cg")
        _write_items(found, items, num_items, PADDED, BLOCK)


def warps_for(count: int) -> int:
    """Return the warps of a token's program: the fastest on an H200 (docs/decisions/0036-experts.md)."""
    return 1 if count <= 128 else 4


def block_of(tokens: int, count: int, chosen: int) -> int:
    """Return the entries of an item: 16 in a decode launch of few rows; for more tokens about an expert's average, up
    to 128."""
    if tokens <= FEW_TOKENS:
        return LEAST_BLOCK
    return min(max(1 << (ceil_div(tokens * chosen, count) - 1).bit_length(), LEAST_BLOCK), 128)


def route(
    scores: torch.Tensor,
    live: torch.Tensor,
    choice: Choice,
    arrived: torch.Tensor,
    *,
    beside: int = 0,
    squares: tuple[torch.Tensor, int, float] | None = None,
    depth: int = 0,
    dependent: bool = False,
) -> Routing:
    """Send tokens to experts.

    scores: float32 contiguous [T, experts + beside], the experts' scores first. live: int [T], more than 0 for unmasked
    tokens. arrived: int32 [1], zero before and after. squares: float64 [tiles, T or more] sums of squares of the
    router's input, the number of tiles, and the eps of the input's norm over `depth` numbers; `Routing.scale` is then
    computed. dependent: launched programmatically. One program routes a few tokens, without `arrived`, if there are at
    most IN_COPIES experts, the number of scores is a multiple of 4 and the choice has no groups. The bits of routing
    weights are the same.
    """
    (tokens, scored), chosen = scores.shape, choice.chosen
    count = scored - beside
    assert 0 < chosen <= min(count, MOST_CHOSEN)
    block, device = block_of(tokens, count, chosen), scores.device
    items = min(count, tokens * chosen) + tokens * chosen // block
    found = Routing(
        torch.empty(tokens * chosen, dtype=torch.float32, device=device),
        torch.empty((count, tokens), dtype=torch.int32, device=device),
        torch.empty((items, ITEM), dtype=torch.int32, device=device),
        torch.empty(tokens, dtype=torch.float32, device=device),
        block,
    )
    made, tiles, eps = (scores, 0, 0.0) if squares is None else squares
    few = tokens <= _TOGETHER and padded(count) <= IN_COPIES and scored % 4 == 0 and not choice.limits_groups
    copies = max(triton.next_power_of_2(tokens), _WARPS_TOGETHER) if few else 1
    indexes = found.entries if few else torch.empty((tokens, count), dtype=torch.int8, device=device)
    _route_kernel[(1 if few else tokens,)](
        scores,
        choice.correction,
        live,
        made,
        found,
        indexes,
        eps,
        tokens,
        items,
        BLOCK=block,
        DEPTH=depth,
        SQUARES=tiles,
        ALL_SQUARES=triton.next_power_of_2(max(tiles, 1)),
        STRIDE=0 if squares is None else made.shape[1],
        LISTS=few,
        DEPENDENT=dependent,
        num_warps=_WARPS_TOGETHER if few else warps_for(count),
        enable_fp_fusion=False,  # as where a lone token's norm is scaled: a fused multiply-add has other bits
        CHOICE=choice_sizes(choice, count, scored, copies),
        launch_pdl=dependent,
    )
    if few:
        return found
    counts = torch.empty(count, dtype=torch.int32, device=device)
    _list_kernel[(count,)](
        indexes,
        found.entries,
        counts,
        found.items,
        arrived,
        tokens,
        items,
        COUNT=count,
        CHOSEN=chosen,
        PADDED=padded(count),
        LISTED=min(_LISTED, max(triton.next_power_of_2(tokens), 16)),
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return found
