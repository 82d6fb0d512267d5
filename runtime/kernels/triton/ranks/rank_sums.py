"""Sums over ranks, on their way into the residual of a stream."""

from __future__ import annotations

from typing import cast

import torch

from runahead.runtime.kernels.layers import EmbeddingAndHead, Norm
from runahead.runtime.kernels.ranks import DeviceRanks, Ranks
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual
from runahead.runtime.kernels.triton.ops.embedding import embed


def add_of_ranks(partial: torch.Tensor, ranks: Ranks, residual: Residual, norm: Norm | None) -> None:
    """`residual.values += ` the sum of all ranks' partials, bfloat16 [T, H] contiguous. norm: that follows, for which
    the rest of `residual` is made, with one tile of squares; None: a product reads the values as they are."""
    if norm is None:
        ranks.reduce(partial)
        residual.values.add_(partial)
        return
    cast(DeviceRanks, ranks).reduce_add(partial, residual.values, norm.weight, residual.scaled, residual.squares)


def embed_on_ranks(token_ids: torch.Tensor, ends: EmbeddingAndHead, residual: Residual, norm: Norm | None) -> None:
    """The residual becomes the embedded tokens, int64 [T], each of which one rank has. norm: as `add_of_ranks`."""
    residual.values.zero_()
    own = embed(token_ids, ends.embedding, ends.embedding_scale, ends.ranks.share)
    add_of_ranks(own, ends.ranks, residual, norm)
