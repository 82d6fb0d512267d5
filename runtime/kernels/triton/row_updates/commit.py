"""The end of S: advances rows by their tokens, ends rows that stop, and writes the result ring."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runahead.cuda_graphs import rings
from runahead.runtime.kernels.row_state import PenaltyState, RowState
from runahead.runtime.kernels.triton.row_state.grammar_masks import MaskState
from runahead.runtime.kernels.triton.row_state.record import int_of, offset_of
from runahead.runtime.kernels.triton.row_updates.apply_plan import RowList
from runahead.runtime.kernels.triton.sampling.logprobs import LogprobBuffers
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


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(
    counter, sample_slots, tokens, finite, state, penalties, history, masks, nothing_left, cells, num_rows,
    SLOTS: tl.constexpr, RING_ROWS: tl.constexpr, CELLS: tl.constexpr, VOCAB: tl.constexpr, CONTEXT: tl.constexpr,
    NULL_SLOT: tl.constexpr, ROWS: tl.constexpr, MAX_STOP_IDS: tl.constexpr,
):  # fmt: skip
    number = tl.load(counter) + 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(sample_slots + row, mask=row < num_rows, other=NULL_SLOT).to(tl.int64)
    ok = slot != NULL_SLOT
    token = tl.load(tokens + row, mask=ok, other=0).to(tl.int32)
    is_finite = tl.load(finite + row, mask=ok, other=1) != 0
    is_alive = tl.load(state.alive + slot, mask=ok, other=0) != 0
    position = tl.load(state.seq_len + slot, mask=ok, other=0)
    stop_count = int_of(state.parameters, slot, _STOP_COUNT)
    ends = position >= int_of(state.parameters, slot, _MIN_POSITION)
    is_full = position >= int_of(state.parameters, slot, _MAX_POSITION)
    if masks is not None:
        ends = ends | has_grammar(slot, state.parameters)
    s = tl.arange(0, MAX_STOP_IDS)[None, :]
    there = s < stop_count[:, None]  # a row without stop ids loads none
    ids = tl.load(state.stop_ids + slot[:, None] * MAX_STOP_IDS + s, mask=there, other=-1)
    is_stop = tl.sum((ids == token[:, None]).to(tl.int32), 1) > 0
    stopped = (is_stop & ends) | is_full | (is_finite == 0)
    flags = tl.where(is_finite, 0, _NON_FINITE)
    is_held = is_alive & (row < 0)
    if masks is not None:
        is_held = is_alive & (tl.load(masks.held + slot, mask=ok, other=0) != 0)
        is_alive = is_alive & (is_held == 0)
        is_empty = tl.load(nothing_left + row, mask=ok, other=0) != 0
        stopped = stopped | is_empty
        flags = flags | tl.where(is_empty, _NOTHING_LEFT, 0)
        is_finite = is_finite & (is_empty == 0)  # reported; the following counts kept tokens only
    # Later stores overwrite what other warps have read: stop ids are compared and cells made by four rows a warp.
    tl.debug_barrier()
    tl.store(state.last_token + slot, token, mask=ok & is_alive)
    tl.store(state.seq_len + slot, position + 1, mask=ok & is_alive & is_finite)
    tl.store(state.alive + slot, tl.zeros([ROWS], tl.int8), mask=ok & is_alive & stopped)
    own = int_of(state.parameters, slot, _PENALTY_SLOT).to(tl.int64)
    counted = ok & is_alive & is_finite & (own >= 0)
    said = penalties.counts + own * VOCAB + token
    tl.store(said, tl.load(said, mask=counted, other=0) + 1, mask=counted)  # a penalty slot belongs to one row
    if history is not None:
        tl.store(history + slot * CONTEXT + position, token, mask=ok & is_alive & is_finite)
    low = token | tl.where(stopped, _STOPPED, 0) | flags
    low = tl.where(is_alive, low, _VOID)
    low = tl.where(is_held, _HELD, low)
    cell = (number << 32) | low.to(tl.int64)  # the shift drops the number's high half
    tl.store(cells + ((number % SLOTS) * RING_ROWS + row) * CELLS, cell, mask=ok)


_ADVANCE_ROWS = 16


def advance(
    num_rows: int,
    counter: torch.Tensor,
    rows: RowList,
    tokens: torch.Tensor,
    finite: torch.Tensor,
    state: RowState,
    penalties: PenaltyState,
    results: ResultRing,
    history: torch.Tensor | None = None,
    masks: MaskState | None = None,
    nothing_left: torch.Tensor | None = None,
) -> None:
    """Advance the sampled rows, count their tokens if there are penalties, and store each one's cell: `(launch number
    modulo 2**32) << 32 | flags | token`.

    counter: int64 [1], plans applied so far: this launch's comes after S. num_rows: entries of the row list; those of
    the null slot are skipped. tokens: int32 or int64 [num_rows]. finite: bool [num_rows]. A row that had ended stays
    unchanged, with a VOID cell. history: int32 [slots, context], if a drafter reads it. masks: set if this launch
    judged rows with a grammar: a held row stays unchanged, with a HELD cell. nothing_left: bool [num_rows], with masks.
    """
    _advance_kernel[(triton.cdiv(num_rows, _ADVANCE_ROWS),)](
        counter,
        rows.sample_slots,
        tokens,
        finite.view(torch.int8),
        state.columns,
        penalties,
        history,
        masks,
        None if nothing_left is None else nothing_left.view(torch.int8),
        results.cells,
        num_rows,
        SLOTS=results.cells.shape[0],
        RING_ROWS=results.cells.shape[1],
        CELLS=results.cells.shape[2],
        VOCAB=penalties.counts.shape[1],
        CONTEXT=0 if history is None else history.shape[1],
        NULL_SLOT=state.slots - 1,
        ROWS=_ADVANCE_ROWS,
        MAX_STOP_IDS=state.stop_ids.shape[1],
        num_warps=4,
    )


@triton.jit
def store_logprobs(row, at, wanted, found, top_stride, ring, MAX_TOP: tl.constexpr, TOP_PAD: tl.constexpr):
    """Store a row's log-probability and its top `wanted` entries to entry `at` of the ring. found, ring: pointers to
    the log-probability, the top ids and the top log-probabilities.
    """
    logprob, top_ids, top_logprobs = found
    ring_logprob, ring_top_ids, ring_top_logprobs = ring
    i = tl.arange(0, TOP_PAD)
    listed = i < tl.minimum(wanted, MAX_TOP)
    tl.store(ring_logprob + at, tl.load(logprob + row))
    ids = tl.load(top_ids + row * top_stride + i, mask=listed, other=0)
    tl.store(ring_top_ids + at * MAX_TOP + i, ids, mask=listed)
    values = tl.load(top_logprobs + row * top_stride + i, mask=listed, other=0.0)
    tl.store(ring_top_logprobs + at * MAX_TOP + i, values, mask=listed)


@triton.jit
def _logprobs_kernel(
    counter, sample_slots, parameters, found, top_stride, ring, SLOTS: tl.constexpr, RING_ROWS: tl.constexpr,
    CELLS: tl.constexpr, MAX_TOP: tl.constexpr, TOP_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wanted = int_of(parameters, tl.load(sample_slots + row), _LOGPROBS)
    if wanted >= 0:
        at = (((tl.load(counter) + 1) % SLOTS) * RING_ROWS + row) * CELLS
        store_logprobs(row, at, wanted, found, top_stride, ring, MAX_TOP, TOP_PAD)


def write_logprobs(
    num_rows: int,
    counter: torch.Tensor,
    rows: RowList,
    logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
    state: RowState,
    results: ResultRing,
) -> None:
    """Write log-probabilities of each asking row's first token into the result slot, before cells are stored.

    logprob: float32 [num_rows]. top_ids: int32, top_logprobs: float32 [num_rows, max_top], with equal row strides.
    """
    max_top = results.top_ids.shape[3]
    _logprobs_kernel[(num_rows,)](
        counter,
        rows.sample_slots,
        state.parameters,
        (logprob, top_ids, top_logprobs),
        top_ids.stride(0),
        (results.logprob, results.top_ids, results.top_logprobs),
        SLOTS=results.cells.shape[0],
        RING_ROWS=results.cells.shape[1],
        CELLS=results.cells.shape[2],
        MAX_TOP=max_top,
        TOP_PAD=triton.next_power_of_2(max_top),
        num_warps=1,
    )


@triton.jit
def _prompt_logprobs_kernel(
    counter, indexes, asked, found, top_stride, ring, SLOTS: tl.constexpr, RING_TOKENS: tl.constexpr,
    MAX_TOP: tl.constexpr, TOP_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    index = tl.load(indexes + row)
    wanted = tl.load(asked + index)
    if (wanted >= 0) & (index < RING_TOKENS):
        at = (tl.load(counter) % SLOTS) * RING_TOKENS + index
        store_logprobs(row, at, wanted, found, top_stride, ring, MAX_TOP, TOP_PAD)


def write_prompt_logprobs(
    counter: torch.Tensor, indexes: torch.Tensor, asked: torch.Tensor, found: LogprobBuffers, results: ResultRing
) -> None:
    """Write log-probabilities of the query tokens `indexes`, int32 [n], into the running launch's result slot. asked:
    int32 [T] by query token; a negative one is skipped.
    """
    max_top = results.prompt_top_ids.shape[2]
    _prompt_logprobs_kernel[(indexes.shape[0],)](
        counter,
        indexes,
        asked,
        (found.logprob, found.top_ids, found.top_logprobs),
        found.top_ids.stride(0),
        (results.prompt_logprob, results.prompt_top_ids, results.prompt_top_logprobs),
        SLOTS=results.prompt_logprob.shape[0],
        RING_TOKENS=results.prompt_logprob.shape[1],
        MAX_TOP=max_top,
        TOP_PAD=triton.next_power_of_2(max_top),
        num_warps=1,
    )
