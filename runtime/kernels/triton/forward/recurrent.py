"""Recurrent mixers as streams compute them, between their two products: of rows that decode by one kernel, of other
rows by sub-chunks."""

from __future__ import annotations

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import GatedDelta, Mamba2, Norm
from runahead.runtime.kernels.ranks import Ranks
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.gemm.epilogue import Squares
from runahead.runtime.kernels.triton.recurrent.gated_delta_decode import delta_of_decode_rows
from runahead.runtime.kernels.triton.recurrent.gated_delta_scan import delta_of_chunks
from runahead.runtime.kernels.triton.recurrent.mamba2_decode import mamba2_of_decode_rows
from runahead.runtime.kernels.triton.recurrent.mamba2_scan import mamba2_of_chunks
from runahead.runtime.kernels.triton.recurrent.scan import ChunkRows
from runahead.runtime.kernels.triton.recurrent.tiling import LONE_ROW, LONE_RUN, STATES

Recurrent = Mamba2 | GatedDelta
# Of one mixer, float32: each [state slots, *shape], and behind them the inputs of drafts, [slots of rows, K, inputs].
States = tuple[torch.Tensor, ...]


def of_decode_rows(
    projected: torch.Tensor,
    weights: Recurrent,
    states: States,
    batch: ForwardBatch,
    buffers: DecodeBuffers,
    *,
    out: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    dependent: bool = False,
) -> tuple[torch.Tensor, Squares]:
    """Compute the input of `weights.out` for rows with one query token and possibly drafts, [T, inner], and advance
    their states to the newest token; masked rows get zeros. projected: result of `weights.proj`. out: result tensor;
    other rows' tokens in it are unchanged. squares: result of `squares_of_norm`: the product that reads the result
    applies the norm's scale, and the squares are returned with the number of their tiles.

    A token has the same bits whether its row may have drafts or not. A lone row's states are cut into more programs,
    which changes no bit.
    """
    batch = batch.in_rows or batch
    groups = weights.shape.groups if isinstance(weights, Mamba2) else weights.shape.key_heads
    tiling = STATES if batch.num_rows > 1 else LONE_RUN if states[-1].shape[1] else LONE_ROW
    arrived = buffers.meetings(batch.num_rows * groups, projected.device)
    if out is None:
        out = projected.new_empty((projected.shape[0], weights.shape.inner))
    if isinstance(weights, GatedDelta):
        delta_of_decode_rows(projected, weights, states, batch, out, arrived, dependent=dependent, tiling=tiling)
        return out, None
    tiles = mamba2_of_decode_rows(
        projected, weights, states, batch, out, arrived, dependent=dependent, squares=squares, tiling=tiling
    )
    return out, None if squares is None else (squares, tiles, weights.gated_norm.eps)


def norm_left(weights: Recurrent) -> Norm | None:
    """Return the norm over a whole row whose scale the next product can apply. The row's programs then do not wait for
    each other. None: the mixer has no such norm, or computes in float16, which may not hold numbers before the norm."""
    if not isinstance(weights, Mamba2) or weights.shape.groups > 1 or weights.out.weight.dtype == torch.float16:
        return None
    return weights.gated_norm


def squares_of_norm(weights: Recurrent, batch: ForwardBatch, like: torch.Tensor, ranks: Ranks) -> torch.Tensor | None:
    """Allocate the sums of squares of a mixer that leaves its norm's scale to the next product: float64 [tiles, columns
    of `like`]. None: the mixer applies the norm itself, as always if ranks divide the row."""
    if norm_left(weights) is None or not ranks.shard.is_whole:
        return None
    batch = batch.in_rows or batch
    lone = batch.is_decode and batch.num_rows == 1
    return like.new_empty((weights.shape.inner if lone else 1, like.shape[1]))


def of_any_tokens(
    projected: torch.Tensor,
    weights: Recurrent,
    states: States,
    rows: ChunkRows,
    buffers: DecodeBuffers,
    squares: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Squares]:
    """The same of all rows, as `of_decode_rows` returns it. All of a chunk of several query tokens is certain, and
    nothing is replayed before it; padding gets zeros."""
    of_rows = states[:-1]
    if isinstance(weights, Mamba2):
        out = mamba2_of_chunks(projected, weights, of_rows, rows, squares)
    else:
        out = delta_of_chunks(projected, weights, of_rows, rows)
    return of_decode_rows(projected, weights, states, rows.batch, buffers, out=out, squares=squares)
