"""The end of S with drafts: keeps a run's sampled tokens up to the first that differs from its draft, advances rows by
them, and writes the result ring.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.cuda_graphs import rings
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.kernels.row_state import PenaltyState, RowState
from runahead.runtime.kernels.triton.row_state.drafts import DraftState
from runahead.runtime.kernels.triton.row_state.grammar_masks import MaskState
from runahead.runtime.kernels.triton.row_state.record import int_of, offset_of
from runahead.runtime.kernels.triton.row_updates.apply_plan import RowList
from runahead.runtime.kernels.triton.row_updates.commit import ResultRing, store_logprobs
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


@triton.jit(do_not_specialize=["width"])
def _verify_commit_kernel(
    counter, sample_slots, sampled, state, penalties, drafts, masks, results, top_stride, width, SLOTS: tl.constexpr,
    RING_ROWS: tl.constexpr, CELLS: tl.constexpr, VOCAB: tl.constexpr, CONTEXT: tl.constexpr, NULL_SLOT: tl.constexpr,
    MOST: tl.constexpr, WIDTH_PAD: tl.constexpr, MAX_STOP_IDS: tl.constexpr, MAX_TOP: tl.constexpr,
    TOP_PAD: tl.constexpr, FORCES: tl.constexpr,
):  # fmt: skip
    """Commit one row. FORCES: drafts may be grammar-forced. masks: this launch judged rows with a grammar."""
    row = tl.program_id(0)
    slot = tl.load(sample_slots + row).to(tl.int64)
    if slot != NULL_SLOT:
        number = tl.load(counter) + 1
        n = tl.arange(0, WIDTH_PAD)
        inside = n < width
        token = tl.load(sampled.tokens + row * width + n, mask=inside, other=0).to(tl.int32)
        is_finite = tl.load(sampled.finite + row * width + n, mask=inside, other=1) != 0
        is_alive = tl.load(state.alive + slot) != 0
        length = tl.load(state.seq_len + slot)
        position = length + n
        looked_at = tl.load(drafts.drafted + slot)
        if masks is not None:
            is_held = is_alive & (tl.load(masks.held + slot) != 0)
            is_alive = is_alive & (is_held == 0)
            looked_at = tl.where(is_held, 0, looked_at)
        draft = tl.load(drafts.proposed + slot * MOST + n, mask=n < looked_at, other=0)
        is_stop = n < 0
        stop_count = int_of(state.parameters, slot, _STOP_COUNT)
        if stop_count > 0:  # a row without stop ids loads none
            s = tl.arange(0, MAX_STOP_IDS)
            ids = tl.load(state.stop_ids + slot * MAX_STOP_IDS + s, mask=s < stop_count, other=-1)
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
        goes_on = (n < looked_at) & (draft == token) & (stopped == 0)
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
            for one in range(0, tl.where(wanted >= 0, count, 0)):
                store_logprobs(
                    row * width + one, ((number % SLOTS) * RING_ROWS + row) * CELLS + one, wanted,
                    (sampled.logprob, sampled.top_ids, sampled.top_logprobs), top_stride,
                    (results.logprob, results.top_ids, results.top_logprobs), MAX_TOP, TOP_PAD,
                )  # fmt: skip
        own = int_of(state.parameters, slot, _PENALTY_SLOT).to(tl.int64)
        # A run may repeat a token.
        tl.atomic_add(penalties.counts + own * VOCAB + token, n * 0 + 1, mask=kept & (own >= 0), sem="relaxed")
        if CONTEXT > 0:
            tl.store(drafts.history + slot * CONTEXT + position, token, mask=kept)
        tl.debug_barrier()  # later stores overwrite what other threads have read
        tl.store(state.last_token + slot, newest, mask=is_alive)
        tl.store(state.seq_len + slot, length + brought, mask=is_alive)
        tl.store(state.alive + slot, tl.where(end, 0, 1).to(tl.int8), mask=is_alive)
        at = (number % SLOTS) * RING_ROWS + row
        if FORCES:
            looked_at += tl.where((looked_at > 0) & (tl.load(drafts.forced + slot) != 0), _FORCED, 0)
        tl.store(results.drafted + at, looked_at.to(tl.int8))
        low = token | tl.where(stopped, _STOPPED, 0) | flags
        low = tl.where(in_run, low, _VOID)
        if masks is not None:
            low = tl.where(is_held & (n == 0), _HELD, low)
        cell = (number << 32) | low.to(tl.int64)  # the shift drops the number's high half
        tl.store(results.cells + at * CELLS + n, cell, mask=inside)


def advance_verified(
    num_rows: int,
    width: int,
    counter: torch.Tensor,
    rows: RowList,
    sampled: Sampled,
    state: RowState,
    penalties: PenaltyState,
    drafts: DraftState,
    results: ResultRing,
    masks: MaskState | None = None,
) -> None:
    """Advance rows by runs: the first token, and each next one whose predecessor equals its draft and did not end the
    row. Kept tokens are counted if there are penalties, and join the row's history.

    counter: int64 [1], plans applied so far: this launch's comes after S. num_rows: entries of the row list. width: 1 +
    K of the previous F: cells written for each row, VOID behind its run, all VOID if it had ended. sampled: [num_rows *
    width], each computed as if all earlier drafts were right; log-probabilities are written for kept tokens of rows
    that asked. Values behind a row's last draft are undefined. masks: set if this launch judged rows with a grammar: a
    held row stays unchanged, its first cell is HELD and the others VOID.
    """
    nothing_left = None if sampled.nothing_left is None else sampled.nothing_left.view(torch.int8)
    max_top = results.top_ids.shape[3]
    _verify_commit_kernel[(num_rows,)](
        counter,
        rows.sample_slots,
        sampled._replace(finite=sampled.finite.view(torch.int8), nothing_left=nothing_left),
        state.columns,
        penalties,
        drafts,
        masks,
        results,
        0 if sampled.top_ids is None else sampled.top_ids.stride(0),
        width,
        SLOTS=results.cells.shape[0],
        RING_ROWS=results.cells.shape[1],
        CELLS=results.cells.shape[2],
        VOCAB=penalties.counts.shape[1],
        CONTEXT=drafts.history.shape[1],
        NULL_SLOT=state.slots - 1,
        MOST=drafts.most,
        WIDTH_PAD=triton.next_power_of_2(1 + drafts.most),
        MAX_STOP_IDS=state.stop_ids.shape[1],
        MAX_TOP=max_top,
        TOP_PAD=triton.next_power_of_2(max_top),
        FORCES=drafts.holds,
        num_warps=1,
    )
