"""Log-probabilities on the device, of a token and the top tokens, for the rows that asked.

The counterpart of `reference.sampling.log_probabilities`, for sampled tokens and for prompts.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.sampling.parameters import (
    ASKS,
    TILE,
    LogitRows,
    logits_of_row,
    of_tiles,
    programs_for,
    tiles_of_program,
)
from runahead.runtime.kernels.triton.sampling.scores import mass_of, mass_one


class LogprobBuffers(NamedTuple):
    """Results and scratch for up to `rows` rows at a time, made once."""

    logprob: torch.Tensor  # float32 [rows]
    top_ids: torch.Tensor  # int32 [rows, top_pad]
    top_logprobs: torch.Tensor  # float32 [rows, top_pad]
    tile_mass: torch.Tensor  # int64 [rows, tiles]
    tile_top: torch.Tensor  # int64 [rows, tiles, top_pad]
    max_top: int


def make_logprob_buffers(rows: int, vocab_size: int, max_top: int, device: torch.device) -> LogprobBuffers:
    """Make zeroed buffers."""
    tiles, top_pad = triton.cdiv(vocab_size, TILE), triton.next_power_of_2(max(max_top, 1))
    return LogprobBuffers(
        logprob=torch.zeros(rows, dtype=torch.float32, device=device),
        top_ids=torch.zeros((rows, top_pad), dtype=torch.int32, device=device),
        top_logprobs=torch.zeros((rows, top_pad), dtype=torch.float32, device=device),
        tile_mass=torch.zeros((rows, tiles), dtype=torch.int64, device=device),
        tile_top=torch.zeros((rows, tiles, top_pad), dtype=torch.int64, device=device),
        max_top=max_top,
    )


class PromptRing(NamedTuple):
    """Where a launch with prompts leaves log-probabilities, by query token: in its slot of the mapped result ring."""

    counter: torch.Tensor  # int64 [1], the running launch
    logprob: torch.Tensor  # float32 [slots, tokens]
    top_ids: torch.Tensor  # int32 [slots, tokens, max_top]
    top_logprobs: torch.Tensor  # float32 [slots, tokens, max_top]


_NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below every packed logit


@triton.jit(do_not_specialize=["num_rows"])
def _top_tile_kernel(
    rows, kinds, asked, asked_stride, partial_max, out, num_rows, MAX_TOP: tl.constexpr, TOP_PAD: tl.constexpr,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, TILE: tl.constexpr, ROWS_PAD: tl.constexpr,
):  # fmt: skip
    """Compute a tile's mass and its top tokens in order."""
    row, first, end = tiles_of_program(kinds, ASKS, num_rows, TILES, ROWS_PAD)
    if first < end:
        peak = tl.max(of_tiles(partial_max, row, float("-inf"), TILES, TILES_PAD), 0)
        if peak < float("inf"):
            slot = tl.load(rows.slots + row).to(tl.int64)
            count = tl.minimum(tl.load(asked + slot * asked_stride), MAX_TOP)
            base = logits_of_row(rows, row)
            for tile in range(first, end):
                i = tile * TILE + tl.arange(0, TILE)
                inside = i < VOCAB
                x = tl.load(base + i, mask=inside, other=float("-inf"))
                tl.store(out.tile_mass + row * TILES + tile, tl.sum(mass_of(x - peak), 0))
                # An int64 that is ordered by the logit, ties by descending id.
                bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
                ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
                packed = tl.where(inside, (ordered << 32) | (0xFFFFFFFF - i.to(tl.int64)), _NOTHING)
                for index in range(0, count):
                    best = tl.max(packed, 0)
                    tl.store(out.tile_top + (row * TILES + tile) * TOP_PAD + index, best)
                    packed = tl.where(packed == best, _NOTHING, packed)


@triton.jit
def _top_finish_kernel(
    rows, kinds, asked, asked_stride, partial_max, out, tokens, ring, MAX_TOP: tl.constexpr, TOP_PAD: tl.constexpr,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, SLOTS: tl.constexpr, RING_TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute a row's log-probabilities from its tiles; zeros for a row that did not ask and beyond the requested
    number. ring: instead of `out`, the results of a row that asked go there; its slot is its query token's index.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows.slots + row).to(tl.int64)
    p = tl.arange(0, TOP_PAD)
    values = tl.zeros([TOP_PAD], tl.float32)
    ids = tl.zeros([TOP_PAD], tl.int32)
    of_token = tl.full([], 0.0, tl.float32)
    wanted = tl.minimum(tl.load(asked + slot * asked_stride), MAX_TOP)
    count = tl.minimum(wanted, VOCAB)
    asks = (tl.load(kinds + row).to(tl.int32) & ASKS) != 0
    if asks:
        peak = tl.max(of_tiles(partial_max, row, float("-inf"), TILES, TILES_PAD), 0)
        if peak < float("inf"):
            total = tl.sum(of_tiles(out.tile_mass, row, 0, TILES, TILES_PAD), 0)
            normalizer = tl.log(total.to(tl.float64) / mass_one)
            base = logits_of_row(rows, row)
            x = tl.load(base + tl.load(tokens + row))
            of_token = ((x - peak).to(tl.float64) - normalizer).to(tl.float32)
            e = tl.arange(0, TILES_PAD * TOP_PAD)
            listed = (e // TOP_PAD < TILES) & (e % TOP_PAD < count)
            packed = tl.load(out.tile_top + row * TILES * TOP_PAD + e, mask=listed, other=_NOTHING)
            for index in range(0, count):
                best = tl.max(packed, 0)
                packed = tl.where(packed == best, _NOTHING, packed)
                ordered = (best >> 32).to(tl.int32)
                value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                token = (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
                values = tl.where(p == index, ((value - peak).to(tl.float64) - normalizer).to(tl.float32), values)
                ids = tl.where(p == index, token, ids)
    if ring is None:
        tl.store(out.top_ids + row * TOP_PAD + p, ids)
        tl.store(out.top_logprobs + row * TOP_PAD + p, values)
        tl.store(out.logprob + row, of_token)
    else:
        asks = asks & (slot < RING_TOKENS)
        at = (tl.load(ring.counter) % SLOTS) * RING_TOKENS + slot
        tl.store(ring.top_ids + at * MAX_TOP + p, ids, mask=asks & (p < wanted))
        tl.store(ring.top_logprobs + at * MAX_TOP + p, values, mask=asks & (p < wanted))
        tl.store(ring.logprob + at, of_token, mask=asks)


def enqueue_logprobs(
    rows: LogitRows,
    kinds: torch.Tensor,
    asked: torch.Tensor,
    partial_max: torch.Tensor,
    tokens: torch.Tensor,
    out: LogprobBuffers,
    ring: PromptRing | None = None,
) -> None:
    """Enqueue log-probabilities of n rows, after `scan` has written their peaks to `partial_max`, float32 [n, tiles].

    asked: int32 of any stride, by slot. kinds: int8 [n], with the bit `sampling.parameters.ASKS`. tokens: int64 [n] the
    chosen ones. ring: gets the results of prompts' query tokens, which are the slots, instead of `out`.
    """
    count, tiles = rows.slots.shape[0], partial_max.shape[1]
    sizes = {
        "MAX_TOP": out.max_top,
        "TOP_PAD": out.top_ids.shape[1],
        "VOCAB": rows.logits.shape[1],
        "TILES": tiles,
        "TILES_PAD": triton.next_power_of_2(tiles),
    }
    source = (rows, kinds, asked, asked.stride(0), partial_max, out)
    _top_tile_kernel[(programs_for(count, tiles),)](
        *source,
        count,
        **sizes,
        TILE=TILE,
        ROWS_PAD=triton.next_power_of_2(out.logprob.shape[0]),
        num_warps=4,
        enable_fp_fusion=False,
    )
    slots, ring_tokens = (0, 0) if ring is None else ring.logprob.shape
    _top_finish_kernel[(count,)](
        *source, tokens, ring, **sizes, SLOTS=slots, RING_TOKENS=ring_tokens, num_warps=4, enable_fp_fusion=False
    )
