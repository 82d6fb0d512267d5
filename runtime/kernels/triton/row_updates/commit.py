"""The end of S: keeps a row's sampled tokens up to the first that differs from its draft, advances the row by them,
ends rows that stop, and writes the result ring.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runahead.cuda_graphs import rings
from runahead.runtime.kernels.triton.row_state.record import int_of, offset_of
from runahead.runtime.kernels.triton.sampling.parameters import has_grammar

_MIN_POSITION = offset_of("min_position")
_MAX_POSITION = offset_of("max_position")
_STOP_COUNT = offset_of("stop_count")
_LOGPROBS = offset_of("logprobs")
_PENALTY_SLOT = offset_of("penalty_slot")
_STOPPED = tl.constexpr(rings.STOPPED)
_VOID = tl.constexpr(rings.VOID)
_NON_FINITE = tl.constexpr(rings.NON_FINITE)
_NOTHING_LEFT = tl.constexpr(rings.NOTHING_LEFT)
_HELD = tl.constexpr(rings.HELD)
_FORCED = tl.constexpr(rings.FORCED)


class ResultRing(NamedTuple):
    """The device's view of the mapped result ring."""

    cells: torch.Tensor  # int64 [slots, rows, 1 + drafts]
    logprob: torch.Tensor  # float32 [slots, rows, 1 + drafts]
    top_ids: torch.Tensor  # int32 [slots, rows, 1 + drafts, max_top]
    top_logprobs: torch.Tensor  # float32 [slots, rows, 1 + drafts, max_top]
    finite: torch.Tensor  # int8 [slots, rows]
    prompt_logprob: torch.Tensor  # float32 [slots, prompt_tokens]
    prompt_top_ids: torch.Tensor  # int32 [slots, prompt_tokens, max_top]
    prompt_top_logprobs: torch.Tensor  # float32 [slots, prompt_tokens, max_top]
    drafted: torch.Tensor  # int8 [slots, rows]
    status: torch.Tensor  # int32 [slots, STATUS_WORDS]


@triton.jit(do_not_specialize=["width"])
def advance_kernel(
    counter, sample_slots, sampled, state, penalties, history, drafts, masks, results, top_stride, width,
    SIZES: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """Advance one row by its run: its first token, and each next one whose predecessor equals its draft and did not end
    the row. Kept tokens are counted if there are penalties, and each one's cell is stored: `(launch number modulo
    2**32) << 32 | flags | token`.

    counter: int64 [1], plans applied so far: this launch's comes after S. sample_slots: the null slot is skipped.
    sampled: [rows * width], each computed as if all earlier drafts were right; log-probabilities are written
    for kept tokens of rows that asked. Values behind a row's last draft are undefined. width: 1 + K of the previous F:
    cells written for each row, VOID behind its run, all VOID if it had ended. history: int32 [slots, CONTEXT], if a
    drafter reads it. drafts: those verified; None with a width of 1. masks: set if this launch judged rows with a
    grammar: a held row stays unchanged, its first cell is HELD and the others VOID.
    """
    row = tl.program_id(0)
    slot = tl.load(sample_slots + row).to(tl.int64)
    if slot != SIZES.NULL_SLOT:
        number = tl.load(counter) + 1
        n = tl.arange(0, WIDTH_PAD)
        inside = n < width
        token = tl.load(sampled.tokens + row * width + n, mask=inside, other=0).to(tl.int32)
        is_finite = tl.load(sampled.finite + row * width + n, mask=inside, other=1) != 0
        is_alive = tl.load(state.alive + slot) != 0
        length = tl.load(state.seq_len + slot)
        position = length + n
        verified = tl.full([], 0, tl.int32)
        if drafts is not None:
            verified = tl.load(drafts.drafted + slot)
        if masks is not None:
            is_held = is_alive & (tl.load(masks.held + slot) != 0)
            is_alive = is_alive & (is_held == 0)
            verified = tl.where(is_held, 0, verified)
        goes_on = n < verified
        if drafts is not None:
            goes_on = goes_on & (tl.load(drafts.proposed + slot * SIZES.DRAFTS + n, mask=goes_on, other=0) == token)
        is_stop = n < 0
        stop_count = int_of(state.parameters, slot, _STOP_COUNT)
        if stop_count > 0:  # a row without stop ids loads none
            s = tl.arange(0, SIZES.MAX_STOP_IDS)
            ids = tl.load(state.stop_ids + slot * SIZES.MAX_STOP_IDS + s, mask=s < stop_count, other=-1)
            is_stop = tl.sum((ids[None, :] == token[:, None]).to(tl.int32), 1) > 0
        ends = position >= int_of(state.parameters, slot, _MIN_POSITION)
        if masks is not None:
            ends = ends | has_grammar(slot, state.parameters)
        stops = is_stop & ends
        stopped = stops | (position >= int_of(state.parameters, slot, _MAX_POSITION)) | (is_finite == 0)
        flags = tl.where(is_finite, 0, _NON_FINITE)
        if masks is not None:
            is_empty = tl.load(sampled.nothing_left + row * width + n, mask=inside, other=0) != 0
            stopped = stopped | is_empty
            flags = flags | tl.where(is_empty, _NOTHING_LEFT, 0)
            is_finite = is_finite & (is_empty == 0)  # reported; the following counts kept tokens only
        goes_on = goes_on & (stopped == 0)
        count = tl.min(tl.where(goes_on, WIDTH_PAD, n), 0) + 1
        count = tl.where(is_alive, count, 0)
        in_run = n < count
        kept = in_run & is_finite
        is_last = n == count - 1
        end = tl.sum(tl.where(is_last & stopped, 1, 0), 0) > 0
        newest = tl.sum(tl.where(is_last, token, 0), 0)
        brought = tl.sum(kept.to(tl.int32), 0)
        if sampled.logprob is not None:
            wanted = int_of(state.parameters, slot, _LOGPROBS)
            i = tl.arange(0, SIZES.TOP_PAD)
            listed = i < tl.minimum(wanted, SIZES.MAX_TOP)
            for one in range(0, tl.where(wanted >= 0, count, 0)):
                index = row * width + one
                to = ((number % SIZES.SLOTS) * SIZES.RING_ROWS + row) * SIZES.CELLS + one
                tl.store(results.logprob + to, tl.load(sampled.logprob + index))
                ids = tl.load(sampled.top_ids + index * top_stride + i, mask=listed, other=0)
                tl.store(results.top_ids + to * SIZES.MAX_TOP + i, ids, mask=listed)
                values = tl.load(sampled.top_logprobs + index * top_stride + i, mask=listed, other=0.0)
                tl.store(results.top_logprobs + to * SIZES.MAX_TOP + i, values, mask=listed)
        own = int_of(state.parameters, slot, _PENALTY_SLOT).to(tl.int64)
        # A run may repeat a token.
        tl.atomic_add(penalties.counts + own * SIZES.VOCAB + token, n * 0 + 1, mask=kept & (own >= 0), sem="relaxed")
        if history is not None:
            tl.store(history + slot * SIZES.CONTEXT + position, token, mask=kept)
        tl.debug_barrier()  # later stores overwrite what other threads of the program, one warp, have read
        tl.store(state.last_token + slot, newest, mask=is_alive)
        tl.store(state.seq_len + slot, length + brought, mask=is_alive)
        tl.store(state.alive + slot, tl.where(end, 0, 1).to(tl.int8), mask=is_alive)
        at = (number % SIZES.SLOTS) * SIZES.RING_ROWS + row
        if drafts is not None:
            if SIZES.KEPT > 0:  # grammars may force drafts
                verified += tl.where((verified > 0) & (tl.load(drafts.forced + slot) != 0), _FORCED, 0)
            tl.store(results.drafted + at, verified.to(tl.int8))
        low = token | tl.where(stopped, _STOPPED, 0) | flags
        low = tl.where(in_run, low, _VOID)
        if masks is not None:
            low = tl.where(is_held & (n == 0), _HELD, low)
        cell = (number << 32) | low.to(tl.int64)  # the shift drops the number's high half
        tl.store(results.cells + at * SIZES.CELLS + n, cell, mask=inside)
