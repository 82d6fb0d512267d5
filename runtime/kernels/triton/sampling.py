"""The sampler on the device: what `reference.sampling` defines, without a word to the host.

In the form `plain` three kernels: the peak of each tile, its best token with noise, the best of the tiles. In `full`
seven more, which rows that need nothing of them leave at once. Nothing is allocated, shapes depend on n alone, and a
tile or row is computed without its neighbours: the launch can be captured, and a row's bits are its own. Tokens are
those of the reference for the same logits, log-probabilities within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton

from runahead.cuda_graphs.shape import Form
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.kernels.row_state import PenaltyState, RowState
from runahead.runtime.kernels.triton.sampling_draw import TILE, draw_kernel, finish_kernel, scan
from runahead.runtime.kernels.triton.sampling_filters import (
    bias_kernel,
    cut_kernel,
    edited_scan_kernel,
    mask_kernel,
    score_kernel,
)
from runahead.runtime.kernels.triton.sampling_logprobs import LogprobBuffers, enqueue_logprobs, make_logprob_buffers

_CUT_BLOCK: Final = 4096  # tokens that the search for a border looks at in one step
_BIAS_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class SamplerBuffers:
    """Results and scratch for up to `rows` rows at a time, made once. Overwritten by every call."""

    tokens: torch.Tensor  # int64 [rows]
    finite: torch.Tensor  # bool [rows]
    logprobs: LogprobBuffers
    identity: torch.Tensor  # int32 [rows] 0, 1, 2, ...
    partial_max: torch.Tensor  # float32 [rows, tiles]
    partial_arg: torch.Tensor  # int32 [rows, tiles]
    edited_max: torch.Tensor  # float32 [rows, tiles]
    edited_arg: torch.Tensor  # int32 [rows, tiles]
    lowest_allowed: torch.Tensor  # int32 [rows, tiles]
    best_score: torch.Tensor  # float32 [rows, tiles]
    best_id: torch.Tensor  # int32 [rows, tiles]
    cut_key: torch.Tensor  # int32 [rows]
    cut_id: torch.Tensor  # int32 [rows]
    scores: torch.Tensor  # float32 [rows, vocab]
    weights: torch.Tensor  # float32 [rows, vocab]


def make_sampler_buffers(rows: int, vocab_size: int, max_top: int, device: torch.device) -> SamplerBuffers:
    """Buffers for up to `rows` rows: 8 bytes for each of their vocabulary entries, and a little."""
    tiles = triton.cdiv(vocab_size, TILE)

    def f32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def i32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return SamplerBuffers(
        tokens=torch.zeros(rows, dtype=torch.int64, device=device),
        finite=torch.ones(rows, dtype=torch.bool, device=device),
        logprobs=make_logprob_buffers(rows, vocab_size, max_top, device),
        identity=torch.arange(rows, dtype=torch.int32, device=device),
        partial_max=f32(rows, tiles),
        partial_arg=i32(rows, tiles),
        edited_max=f32(rows, tiles),
        edited_arg=i32(rows, tiles),
        lowest_allowed=i32(rows, tiles),
        best_score=f32(rows, tiles),
        best_id=i32(rows, tiles),
        cut_key=i32(rows),
        cut_id=i32(rows),
        scores=f32(rows, vocab_size),
        weights=f32(rows, vocab_size),
    )


def sample_rows_cuda(
    logits: torch.Tensor,
    state: RowState,
    penalties: PenaltyState,
    slots: torch.Tensor,
    form: Form,
    buffers: SamplerBuffers,
    logit_rows: torch.Tensor | None = None,
) -> Sampled:
    """Enqueue the sampling of n rows. Semantics are those of `reference.sampling.sample_rows`.

    logits: float32 [rows, vocab], rows contiguous in themselves. slots: int32 or int64 [n] of `state`.
    logit_rows: int32 or int64 [n], the row of `logits` that each slot samples from; `slots` itself where logits are
    kept by row slot. Without it, row i belongs to slots[i].
    Returns views of `buffers`, whose columns of top log-probabilities are `max_top`; valid until the next call.
    """
    count = slots.shape[0]
    run = _Run(logits, buffers.identity if logit_rows is None else logit_rows, state, penalties, slots, buffers)
    if count > 0:
        run.scan()
        if form is Form.FULL:
            run.edit()
            run.filter()
        run.draw(full=form is Form.FULL)
        if form is Form.FULL:
            run.logprobs()
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
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One call's kernels, in their order."""

    logits: torch.Tensor
    logit_rows: torch.Tensor
    state: RowState
    penalties: PenaltyState
    slots: torch.Tensor
    buffers: SamplerBuffers

    @property
    def _source(self) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.logits, self.logits.stride(0), self.logit_rows, self.slots, self._alive

    @property
    def _alive(self) -> torch.Tensor:
        return self.state.alive.view(torch.int8)

    @property
    def _row(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.state.seq_len, self.state.parameters

    @property
    def _sizes(self) -> dict[str, int]:
        tiles = self.buffers.partial_max.shape[1]
        return {"VOCAB": self.logits.shape[1], "TILES": tiles, "TILES_PAD": triton.next_power_of_2(tiles)}

    @property
    def _tiled(self) -> dict[str, int | bool]:
        """Constants and options of a kernel over tiles. No fused multiply-add: bits must be those of the reference."""
        return {**self._sizes, "TILE": TILE, "num_warps": 4, "enable_fp_fusion": False}

    @property
    def _grid(self) -> tuple[int, int]:
        return self.buffers.partial_max.shape[1], self.slots.shape[0]

    def scan(self) -> None:
        buffers = self.buffers
        scan(self.logits, self.logit_rows, self.slots, self._alive, buffers.partial_max, buffers.partial_arg)

    def edit(self) -> None:
        """Penalties, bias and masks: `scores` holds the changed logits of the rows that have any."""
        state, buffers, constants = self.state, self.buffers, self._tiled
        del constants["TILES_PAD"]
        vocab_size = self.logits.shape[1]
        mask_kernel[self._grid](
            *self._source,
            *self._row,
            self.penalties.counts,
            self.penalties.in_prompt,
            state.allowed,
            state.allowed.shape[1],
            state.stop_ids,
            buffers.scores,
            buffers.lowest_allowed,
            MAX_STOP_IDS=state.stop_ids.shape[1],
            **constants,
        )
        bias_kernel[(self.slots.shape[0],)](
            self.slots,
            self._alive,
            state.parameters,
            state.bias_ids,
            state.bias_values,
            buffers.scores,
            VOCAB=vocab_size,
            MAX_BIAS=state.bias_ids.shape[1],
            BLOCK=_BIAS_BLOCK,
            num_warps=4,
        )
        edited_scan_kernel[self._grid](
            self.slots, self._alive, *self._row, buffers.scores, buffers.edited_max, buffers.edited_arg, **constants
        )

    def filter(self) -> None:
        """Top-k, top-p, min-p: `scores`, `weights` and the border of the rows that have any."""
        buffers = self.buffers
        score_kernel[self._grid](
            *self._source,
            *self._row,
            buffers.partial_max,
            buffers.edited_max,
            buffers.scores,
            buffers.weights,
            **self._tiled,
        )
        cut_kernel[(self.slots.shape[0],)](
            self.slots,
            self._alive,
            *self._row,
            buffers.partial_max,
            buffers.edited_max,
            buffers.scores,
            buffers.weights,
            buffers.cut_key,
            buffers.cut_id,
            **self._sizes,
            BLOCK=_CUT_BLOCK,
            num_warps=16,
            enable_fp_fusion=False,
        )

    def draw(self, full: bool) -> None:
        buffers, sizes = self.buffers, self._sizes
        del sizes["VOCAB"]
        draw_kernel[self._grid](
            *self._source,
            *self._row,
            buffers.partial_max,
            buffers.edited_max,
            buffers.scores,
            buffers.weights,
            buffers.cut_key,
            buffers.cut_id,
            buffers.best_score,
            buffers.best_id,
            FULL=full,
            **self._tiled,
        )
        finish_kernel[(self.slots.shape[0],)](
            self.slots,
            self._alive,
            *self._row,
            buffers.partial_max,
            buffers.partial_arg,
            buffers.edited_max,
            buffers.edited_arg,
            buffers.lowest_allowed,
            buffers.best_score,
            buffers.best_id,
            buffers.tokens,
            buffers.finite.view(torch.int8),
            FULL=full,
            **sizes,
            num_warps=1,
        )

    def logprobs(self) -> None:
        buffers = self.buffers
        enqueue_logprobs(
            self.logits,
            self.logit_rows,
            self.slots,
            self._alive,
            self.state.logprobs,
            buffers.partial_max,
            buffers.tokens,
            buffers.logprobs,
        )
