"""The inputs of a draft head on a GPU: each token's embedding beside the hidden state of the previous position.

F writes hidden states into the rows' blocks, where it reads earlier launches' states. A previous position in the same
launch is read from the batch, so programs need not synchronize.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Fuse, Norm
from runahead.runtime.kernels.triton.attention.block_table import kv_slots
from runahead.runtime.kernels.triton.attention.prefill_schedule import rows_scanned

NOWHERE: Final = -1  # instead of a KV slot: no previous hidden state
# the previous hidden states: in the batch or a block, in a block, given directly
_OF_BATCH, _OF_PLACES, _GIVEN = 0, 1, 2
_IN_BATCH, _IN_PLACES = tl.constexpr(_OF_BATCH), tl.constexpr(_OF_PLACES)
_NOWHERE = tl.constexpr(NOWHERE)


class _Batch(NamedTuple):
    """The tensors of a `ForwardBatch` that the kernel reads, under their names there."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


@triton.jit
def _normed(x, norm, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    weight, eps = norm
    i = tl.arange(0, BLOCK)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    return x * scale * tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _join_kernel(
    hidden, kept, indexes, table, batch, token_norm, hidden_norm, joined, residual, table_stride, num_rows,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    BY_TOKEN: tl.constexpr, BEFORE: tl.constexpr, HIDDEN_FIRST: tl.constexpr, LEAVES_NORMED: tl.constexpr,
):  # fmt: skip
    """Join one token's inputs. residual: gets the hidden state, or with LEAVES_NORMED its norm.

    BEFORE: where the previous hidden state is. Of F's tokens, it may be in the batch or in a block, and the token's own
    is stored in its block. ROWS: rows to search for the token's; 1: each row has one query token. BY_TOKEN: block
    tables are by query token instead of row.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HIDDEN
    if BEFORE == _IN_BATCH:
        own = tl.load(hidden + token * HIDDEN + i, mask=inside, other=0.0)
        tl.store(kept + tl.load(batch.slot_mapping + token) * HIDDEN + i, own, mask=inside)
        row = token.to(tl.int32)
        if ROWS > 1:
            r = tl.arange(0, ROWS)
            ends = tl.load(batch.query_start_loc + 1 + r, mask=r < num_rows, other=0x7FFFFFFF)
            row = tl.sum((ends <= token).to(tl.int32), 0)
        there = row < num_rows
        row = tl.minimum(row, num_rows - 1)
        position = tl.load(batch.positions + token)
        there = there & (position > 0) & (tl.load(batch.seq_lens + row) > 0)
        beside = there & (tl.load(batch.query_start_loc + row) < token)
        elsewhere = there & (beside == 0)
        last = tl.maximum(position - 1, 0)
        table_row = row.to(tl.int64)
        if BY_TOKEN:
            table_row = token
        index = kv_slots(batch.block_tables + table_row * table_stride, last, elsewhere, BLOCK_SIZE)
        in_batch = tl.load(hidden + (token - 1) * HIDDEN + i, mask=inside & beside, other=0.0)
        in_block = tl.load(kept + index * HIDDEN + i, mask=inside & elsewhere, other=0.0)
        state = tl.where(beside, in_batch, in_block)
    elif BEFORE == _IN_PLACES:
        index = tl.load(indexes + token)
        state = tl.load(kept + index * HIDDEN + i, mask=inside & (index != _NOWHERE), other=0.0)
    else:
        state = tl.load(hidden + token * HIDDEN + i, mask=inside, other=0.0)
    embedded = tl.load(table + tl.load(batch.token_ids + token) * WIDTH + i, mask=i < WIDTH, other=0.0)
    joins = state
    if hidden_norm is not None:
        joins = _normed(state, hidden_norm, HIDDEN, BLOCK)
    if token_norm is not None:
        embedded = _normed(embedded, token_norm, WIDTH, BLOCK)
    line = joined + token * (WIDTH + HIDDEN)
    if HIDDEN_FIRST:
        tl.store(line + i, joins.to(joined.dtype.element_ty), mask=inside)
        tl.store(line + HIDDEN + i, embedded.to(joined.dtype.element_ty), mask=i < WIDTH)
    else:
        tl.store(line + i, embedded.to(joined.dtype.element_ty), mask=i < WIDTH)
        tl.store(line + WIDTH + i, joins.to(joined.dtype.element_ty), mask=inside)
    if residual is not None:
        left = state
        if LEAVES_NORMED:
            left = joins
        tl.store(residual + token * HIDDEN + i, left.to(residual.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Joining:
    """Inputs common to draft heads. table: embeddings, contiguous [vocab, width]. kept: hidden states in the rows'
    blocks, contiguous [KV slots, hidden].
    """

    fuse: Fuse
    table: torch.Tensor
    kept: torch.Tensor
    block_size: int

    def in_batch(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Join the query tokens of an F with their rows' hidden states, contiguous [T, hidden], and store those in the
        blocks. A row's first token gets zeros. Returns the input of `Fuse`, [T, width + hidden].
        """
        in_rows = batch.in_rows or batch
        single = in_rows.is_decode and in_rows.decode_queries == 1
        rows = 1 if single else rows_scanned(in_rows.num_rows)
        tables = batch.block_tables
        return self._join(_OF_BATCH, replace(in_rows, block_tables=tables), hidden, None, None, rows, batch.by_token)

    def of_places(self, batch: ForwardBatch, indexes: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Join one token a row. indexes: int64 [R], the KV slot of the previous hidden state, or NOWHERE. residual: [R,
        hidden], written for a head without a product.
        """
        return self._join(_OF_PLACES, batch, self.kept, indexes, residual, 1)

    def of_expected(self, batch: ForwardBatch, expected: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Join one token a row with the previous step's predicted hidden states, contiguous [R, hidden]."""
        return self._join(_GIVEN, batch, expected, None, residual, 1)

    def _join(
        self, before: int, batch: ForwardBatch, hidden: torch.Tensor, indexes: torch.Tensor | None,
        residual: torch.Tensor | None, rows: int, by_token: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        fuse, width, depth = self.fuse, self.table.shape[1], self.kept.shape[1]
        tokens = batch.num_tokens
        block = triton.next_power_of_2(max(width, depth))
        joined = self.table.new_empty((tokens, width + depth))
        _join_kernel[(tokens,)](
            hidden,
            self.kept,
            batch.positions if indexes is None else indexes,
            self.table,
            _Batch(
                batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start_loc, batch.seq_lens,
                batch.block_tables,
            ),
            _weight_and_eps(fuse.token_norm),
            _weight_and_eps(fuse.hidden_norm),
            joined,
            residual if fuse.product is None else None,
            batch.block_tables.stride(0),
            batch.num_rows,
            WIDTH=width,
            HIDDEN=depth,
            BLOCK=block,
            BLOCK_SIZE=self.block_size,
            ROWS=rows,
            BY_TOKEN=by_token,
            BEFORE=before,
            HIDDEN_FIRST=fuse.hidden_first,
            LEAVES_NORMED=fuse.normed_residual,
            num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip
        return joined


def _weight_and_eps(norm: Norm | None) -> tuple[torch.Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)
