"""Rows of the embedding table, by token id."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.ranks import WHOLE, Shard

_BLOCK: Final = 1024


@triton.jit
def _embed_kernel(token_ids, table, out, first, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """Look up BLOCK numbers of a token's embedding; 0 for ids outside of this rank's `count` from `first` on."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(token_ids + token) - first
    ours = (index >= 0) & (index < count)
    row = tl.load(table + index * WIDTH + i, mask=ours & (i < WIDTH), other=0.0)
    if SCALE != 1.0:
        row = (row.to(tl.float32) * SCALE).to(table.dtype.element_ty)
    tl.store(out + token * WIDTH + i, row, mask=i < WIDTH)


def embed(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0, shard: Shard = WHOLE) -> torch.Tensor:
    """Look up embeddings.
    token_ids: int64 [T], in the vocabulary. table: contiguous [vocab / ranks, H], the rank's rows.
    scale: multiplies embeddings. Returns [T, H], zeros for other ranks' tokens.
    """
    tokens, width = token_ids.shape[0], table.shape[1]
    out = torch.empty((tokens, width), dtype=table.dtype, device=table.device)
    block = min(triton.next_power_of_2(width), _BLOCK)
    grid = (tokens, triton.cdiv(width, block))
    count = table.shape[0]
    _embed_kernel[grid](
        token_ids, table, out, shard.rank * count, count, WIDTH=width, BLOCK=block, SCALE=scale, num_warps=1
    )
    return out
