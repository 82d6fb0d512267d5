"""The sampler on the device: `reference.sampling` without host synchronization.

The form `plain` has three kernels: each tile's peak, its best token with noise, and the best of the tiles. `full` has
six more, for rows that need them. Nothing is allocated, shapes depend on n only, and a row's result depends on no other
row: the launch can be captured, and a row's bits are its own. Tokens equal the reference's for the same logits,
log-probabilities within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
import triton

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.ranks import DeviceRanks, Ranks
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.kernels.row_state import PenaltyState, RowState
from runahead.runtime.kernels.triton.row_state.grammar_masks import MaskState
from runahead.runtime.kernels.triton.sampling.draw import draw_kernel, scan
from runahead.runtime.kernels.triton.sampling.edit_logits import edit_kernel
from runahead.runtime.kernels.triton.sampling.finish import finish_kernel
from runahead.runtime.kernels.triton.sampling.logprobs import (
    LogprobBuffers,
    enqueue_logprobs,
    make_logprob_buffers,
)
from runahead.runtime.kernels.triton.sampling.parameters import TILE, LogitRows, Sizes, programs_for
from runahead.runtime.kernels.triton.sampling.threshold_bracket import (
    LADDER,
    OFFSETS,
    ROUNDS,
    TILES_OF_A_SAMPLE,
    bracket_kernel,
    guess_kernel,
)

_LIST_BLOCK: Final = 4096  # tokens of a row's list that the threshold search keeps in registers
_BIAS_BLOCK: Final = 256
_WARPS: Final = 4  # of a program of a kernel that rows share: an H200's multiprocessor has registers for four programs


class SamplerBuffers(NamedTuple):
    """Results and scratch for up to `rows` rows at a time, made once and overwritten by every call."""

    tokens: torch.Tensor  # int64 [rows]
    finite: torch.Tensor  # bool [rows]
    nothing_left: torch.Tensor  # bool [rows]
    logprobs: LogprobBuffers
    identity: torch.Tensor  # int32 [rows] 0, 1, 2, ...
    kinds: torch.Tensor  # int8 [rows] the bits of `sampling/parameters.py`
    partial_max: torch.Tensor  # float32 [rows, tiles]
    partial_arg: torch.Tensor  # int32 [rows, tiles]
    edited_max: torch.Tensor  # float32 [rows, tiles]
    edited_arg: torch.Tensor  # int32 [rows, tiles]
    lowest_allowed: torch.Tensor  # int32 [rows, tiles]
    ladder: torch.Tensor  # float32 [rungs] `sampling.threshold_bracket.LADDER`
    guesses: torch.Tensor  # float32 [rows, samples, rungs]
    offsets: torch.Tensor  # float32 [rounds, spots] `sampling.threshold_bracket.OFFSETS`
    threshold_keys: torch.Tensor  # int32 [rows, rounds, spots]
    threshold_sums: torch.Tensor  # int64 [rows, rounds, tiles, spots]
    best_score: torch.Tensor  # float32 [rows, tiles]
    best_id: torch.Tensor  # int32 [rows, tiles]
    threshold_key: torch.Tensor  # int32 [rows] the threshold's key, and the last kept id with that key
    threshold_id: torch.Tensor  # int32 [rows]
    edited_logits: torch.Tensor  # float32 [rows, vocab] of edited rows
    listed: torch.Tensor  # int32 [rows, vocab] tokens near the threshold, a tile's from its first index
    list_lengths: torch.Tensor  # int32 [rows, tiles] their number
    sampled_vocab: int  # ids below this may be sampled


def make_sampler_buffers(
    rows: int, vocab_size: int, max_top: int, device: torch.device, sampled_vocab: int | None = None
) -> SamplerBuffers:
    """Make buffers for up to `rows` rows: about 8 bytes for each of their vocabulary entries. sampled_vocab: ids below
    this may be sampled; None: all.
    """
    tiles = triton.cdiv(vocab_size, TILE)

    def f32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def i32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return SamplerBuffers(
        tokens=torch.zeros(rows, dtype=torch.int64, device=device),
        finite=torch.ones(rows, dtype=torch.bool, device=device),
        nothing_left=torch.zeros(rows, dtype=torch.bool, device=device),
        logprobs=make_logprob_buffers(rows, vocab_size, max_top, device),
        identity=torch.arange(rows, dtype=torch.int32, device=device),
        kinds=torch.zeros(rows, dtype=torch.int8, device=device),
        partial_max=f32(rows, tiles),
        partial_arg=i32(rows, tiles),
        edited_max=f32(rows, tiles),
        edited_arg=i32(rows, tiles),
        lowest_allowed=i32(rows, tiles),
        ladder=torch.tensor(LADDER, dtype=torch.float32, device=device),
        guesses=f32(rows, triton.cdiv(tiles, TILES_OF_A_SAMPLE), len(LADDER)),
        offsets=torch.tensor(OFFSETS, dtype=torch.float32, device=device),
        threshold_keys=i32(rows, ROUNDS, len(OFFSETS[0])),
        threshold_sums=torch.zeros((rows, ROUNDS, tiles, len(OFFSETS[0])), dtype=torch.int64, device=device),
        best_score=f32(rows, tiles),
        best_id=i32(rows, tiles),
        threshold_key=i32(rows),
        threshold_id=i32(rows),
        edited_logits=f32(rows, vocab_size),
        listed=i32(rows, vocab_size),
        list_lengths=i32(rows, tiles),
        sampled_vocab=vocab_size if sampled_vocab is None else sampled_vocab,
    )


@dataclass(frozen=True, slots=True)
class VocabPart:
    """A rank's part of the vocabulary in the plain form, in which all ranks choose each token together.

    first: its first id. buffers: as of the whole vocabulary, with the peers' best in the last columns.
    """

    ranks: DeviceRanks
    first: int
    buffers: SamplerBuffers


def make_vocab_part(ranks: Ranks, width: int, whole: SamplerBuffers) -> VocabPart | None:
    """None for a whole model, and where a part would cut a block of noise of four tokens. width: of each part. whole:
    buffers of the whole vocabulary, whose results the part's are."""
    own, rows = ranks.shard, whole.kinds.shape[0]
    if own.is_whole or width % 4:
        return None
    tiles, first = triton.cdiv(width, TILE) + own.of - 1, own.rank * width
    floats = ("partial_max", "edited_max", "best_score")
    by_tile: dict[str, Any] = {name: whole.ladder.new_zeros((rows, tiles)) for name in floats}
    ints = ("partial_arg", "edited_arg", "best_id", "lowest_allowed", "list_lengths")
    by_tile |= {name: whole.identity.new_zeros((rows, tiles)) for name in ints}
    sampled = min(max(whole.sampled_vocab - first, 0), width)
    return VocabPart(cast(DeviceRanks, ranks), first, whole._replace(**by_tile, sampled_vocab=sampled))


class VerifiedTokens(NamedTuple):
    """Rows that verify drafts. Each row of the row state has `width` consecutive rows to sample: its next token, and
    the one after each of its first width - 1 drafts, as if these were right.
    """

    width: int  # usually 2, 4 or 8: 1 + K
    drafts: torch.Tensor  # int32 [slots, most], most >= width - 1


def sample_rows_cuda(
    logits: torch.Tensor,
    state: RowState,
    penalties: PenaltyState,
    slots: torch.Tensor,
    form: Form,
    buffers: SamplerBuffers,
    logit_rows: torch.Tensor | None = None,
    runs: VerifiedTokens | None = None,
    masks: MaskState | None = None,
    part: VocabPart | None = None,
) -> Sampled:
    """Enqueue the sampling of n rows with the semantics of `reference.sampling.sample_rows`.

    logits: float32 [rows, vocab], each row contiguous; ids that may not be sampled become -inf.
    slots: int32 or int64 [n] of `state`.
    logit_rows: int32 or int64 [n], the row of `logits` for each slot; `slots` itself if logits are kept by row slot;
        without it, row i belongs to slots[i]. runs: n is a multiple of its width, and a run's rows without a draft have
        a slot that is not alive. masks: some rows have a grammar and were judged in this launch; held ones are skipped
        like rows that are not alive. Full form only. part: on a rank in the plain form; `logits` and `buffers` are the
        part's. Returns views of `buffers` with `max_top` columns of top log-probabilities, valid until the next call.
    """
    count, identity = slots.shape[0], buffers.identity
    if count > 0:
        rows = LogitRows(logits, logits.stride(0), identity if logit_rows is None else logit_rows, slots)
        runs = runs or VerifiedTokens(1, identity.view(-1, 1))
        _enqueue(rows, state, penalties, form is Form.FULL, buffers, runs, masks, part)
    tokens, finite = buffers.tokens[:count], buffers.finite[:count]
    if form is Form.PLAIN:
        return Sampled(tokens, finite)
    found = buffers.logprobs
    return Sampled(
        tokens,
        finite,
        found.logprob[:count],
        found.top_ids[:count, : found.max_top],
        found.top_logprobs[:count, : found.max_top],
        None if masks is None else buffers.nothing_left[:count],
    )


def _enqueue(
    rows: LogitRows, state: RowState, penalties: PenaltyState, full: bool, buffers: SamplerBuffers,
    runs: VerifiedTokens, masks: MaskState | None, part: VocabPart | None,
) -> None:  # fmt: skip
    """Enqueue the kernels of `sample_rows_cuda`, in order."""
    count, (_, vocab), tiles = rows.slots.shape[0], rows.logits.shape, buffers.partial_max.shape[1]
    samples, first, verifies = buffers.guesses.shape[1], 0 if part is None else part.first, runs.width > 1
    alive = state.alive.view(torch.int8) if masks is None else masks.samples
    padded = triton.next_power_of_2
    sizes = Sizes(vocab, tiles, padded(tiles), TILE, padded(len(buffers.kinds)), samples, padded(samples), _LIST_BLOCK)
    # For kernels whose programs compute tiles of any row. No fused multiply-add: bits equal the reference's.
    shared: dict[str, Any] = {"SIZES": sizes, "num_warps": _WARPS, "maxnreg": 128, "enable_fp_fusion": False}
    programs = (programs_for(count, tiles),)
    sampled, peaks = (state.seq_len, state.parameters, buffers.kinds), (buffers.partial_max, buffers.partial_arg)
    scan(rows, alive, *peaks, sampled, runs.width, masks is not None, buffers.sampled_vocab, first)
    if part is not None:
        part.ranks.best(*peaks, count)
    if full:
        # Apply penalties, bias and masks; writes edited rows' logits to `edited_logits`.
        edit_kernel[programs](
            rows, count, state.columns, penalties, state.allowed.shape[1], masks, buffers, runs, VERIFIES=verifies,
            MOST_DRAFTS=runs.drafts.shape[1], MASK_AT=0 if masks is None else masks.mask_at,
            MASK_LINE=0 if masks is None else masks.words.shape[2],
            MASK_LINES=0 if masks is None else masks.words.shape[1], MAX_STOP_IDS=state.stop_ids.shape[1],
            MAX_BIAS=state.bias_ids.shape[1], SAMPLED_VOCAB=buffers.sampled_vocab, BIAS_BLOCK=_BIAS_BLOCK, **shared,
        )  # fmt: skip
        # Bracket the thresholds of top-k and top-p.
        guess_kernel[(programs_for(count, samples),)](rows, count, state.parameters, buffers, **shared)
        for again in range(ROUNDS):
            bracket_kernel[programs](rows, count, state.parameters, buffers, AGAIN=again, THREADS=32 * _WARPS, **shared)
    draw_kernel[programs](
        rows, count, state.columns, buffers, runs.width, FULL=full, VERIFIES=verifies, FIRST=first,
        **{**shared, "num_warps": 2 * _WARPS if full else _WARPS},
    )  # fmt: skip
    if part is not None:
        part.ranks.best(buffers.best_score, buffers.best_id, count)
    finish_kernel[(count,)](
        rows, alive, state.columns, buffers, runs.width, FULL=full, VERIFIES=verifies, MASKED=masks is not None,
        SIZES=sizes, num_warps=16 if full else 1, enable_fp_fusion=False,
    )  # fmt: skip
    if full:
        enqueue_logprobs(rows, buffers.kinds, state.logprobs, buffers.partial_max, buffers.tokens, buffers.logprobs)
