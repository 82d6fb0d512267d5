"""Sums over ranks, on their way into the residual of a stream."""

from __future__ import annotations

from typing import cast

import torch

from runahead.runtime.kernels.layers import EmbeddingAndHead, Norm
from runahead.runtime.kernels.ranks import DeviceRanks, Ranks
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual
from runahead.runtime.kernels.triton.ops.embedding import embed


def add_of_ranks(partial: torch.Tensor, ranks: Ranks, residual: Residual, norm: Norm | None) -> int:
    """`residual.values += ` the sum of all ranks' partials, bfloat16 [T, H] contiguous. norm: that follows, for which
    the rest of `residual` is made; None: a product reads the values as they are. Returns the number of tiles of the
    residual's squares."""
    if norm is None:
        ranks.reduce(partial)
        residual.values.add_(partial)
        return 1
    return cast(DeviceRanks, ranks).reduce_add(partial, residual.values, norm.weight, residual.scaled, residual.squares)


def embed_on_ranks(token_ids: torch.Tensor, ends: EmbeddingAndHead, residual: Residual, norm: Norm | None) -> int:
    """The residual becomes the embedded tokens, int64 [T], each of which one rank has. norm, and what is returned: as
    `add_of_ranks`."""
    residual.values.zero_()
    own = embed(token_ids, ends.embedding, ends.embedding_scale, ends.ranks.shard)
    return add_of_ranks(own, ends.ranks, residual, norm)
