"""Recurrent mixers as streams compute them, between their two products: of rows that decode by one kernel, of others by
sub-chunks."""

from __future__ import annotations

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import GatedDelta, Mamba2
from runahead.runtime.kernels.triton.decode_buffers import DecodeBuffers
from runahead.runtime.kernels.triton.delta_chunks import delta_of_chunks
from runahead.runtime.kernels.triton.delta_decode import delta_of_one_token
from runahead.runtime.kernels.triton.mamba2_chunks import mamba2_of_chunks
from runahead.runtime.kernels.triton.mamba2_decode import mamba2_of_one_token
from runahead.runtime.kernels.triton.recurrent_chunks import ChunkRows, length_of_sub_chunks

Recurrent = Mamba2 | GatedDelta
States = tuple[torch.Tensor, ...]  # of one mixer, float32, each [state slots, *shape]


def chunk_rows(batch: ForwardBatch, dtype: torch.dtype) -> ChunkRows:
    """Of a batch for all of its layers. dtype: of the model."""
    return ChunkRows(batch, length_of_sub_chunks(dtype))


def of_one_token(
    projected: torch.Tensor,
    weights: Recurrent,
    states: States,
    batch: ForwardBatch,
    buffers: DecodeBuffers,
    *,
    out: torch.Tensor | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """What `weights.out` reads of rows with one query token, [T, inner], and their states one token further; masked
    ones leave zeros. projected: what `weights.proj` gives. out: where it is put; other rows' tokens there stay as they
    are."""
    assert batch.decode_queries == 1 and not batch.are_lines, "drafts of models that keep states are refused"
    groups = weights.shape.groups if isinstance(weights, Mamba2) else weights.shape.key_heads
    arrived = buffers.meetings(batch.num_rows * groups, projected.device)
    if out is None:
        out = projected.new_empty((projected.shape[0], weights.shape.inner))
    if isinstance(weights, Mamba2):
        mamba2_of_one_token(projected, weights, states, batch, out, arrived, dependent=dependent)
    else:
        delta_of_one_token(projected, weights, states, batch, out, arrived, dependent=dependent)
    return out


def of_several_tokens(projected: torch.Tensor, weights: Recurrent, states: States, rows: ChunkRows) -> torch.Tensor:
    """The same of rows with several query tokens, [T, inner]; zeros of all other tokens and padding."""
    if isinstance(weights, Mamba2):
        return mamba2_of_chunks(projected, weights, states, rows)
    return delta_of_chunks(projected, weights, states, rows)


def of_any_tokens(
    projected: torch.Tensor, weights: Recurrent, states: States, rows: ChunkRows, buffers: DecodeBuffers
) -> torch.Tensor:
    """The same of all rows."""
    out = of_several_tokens(projected, weights, states, rows)
    return of_one_token(projected, weights, states, rows.batch, buffers, out=out)
