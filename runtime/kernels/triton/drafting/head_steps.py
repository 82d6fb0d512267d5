"""The rows of a drafter with layers between its steps: a step's inputs and its proposals.

A step has one query token of each row of F: first the newest token, then the previous step's choice. Everything stays
on the device, so K steps are K times the same kernels.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.drafters.ngram import NO_DRAFT
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.attention.block_table import copy_blocks, kv_slots
from runahead.runtime.kernels.triton.drafting.head_inputs import NOWHERE
from runahead.runtime.kernels.triton.row_state.drafts import DraftState
from runahead.runtime.kernels.triton.row_state.record import int_of, long_of, offset_of

_MAX_POSITION = offset_of("max_position")
_MASK_EPOCH = offset_of("mask_epoch")
_NO_DRAFT = tl.constexpr(NO_DRAFT)
_NOWHERE = tl.constexpr(NOWHERE)


class HeadRows(NamedTuple):
    """A step's inputs at fixed addresses, for S row slots and up to R rows."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    slot_mapping: torch.Tensor  # int64 [R]
    seq_lens: torch.Tensor  # int32 [R] including the step's token; 0: the row takes no part
    starts: torch.Tensor  # int32 [R + 1] 0, 1, 2, ...
    block_tables: torch.Tensor  # int32 [R, max_blocks]
    before: torch.Tensor  # int64 [R] KV slot of the hidden state before the newest token, or NOWHERE
    next_position: torch.Tensor  # int32 [S] position of the token that the step chooses
    active: torch.Tensor  # bool [S] the row takes part

    def batch(self, rows: int, context_length: int) -> ForwardBatch:
        """Return a batch of one query token for each row."""
        return ForwardBatch(
            token_ids=self.token_ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            query_start_loc=self.starts[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            block_tables=self.block_tables[:rows],
            num_tokens=rows,
            num_rows=rows,
            max_seq_len=context_length,
            is_decode=True,
        )

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)


def make_head_rows(slots: int, rows: int, max_blocks: int, device: torch.device) -> HeadRows:
    """Make inputs in which no row takes part."""

    def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return HeadRows(
        token_ids=zeros(torch.int64, rows),
        positions=zeros(torch.int64, rows),
        slot_mapping=zeros(torch.int64, rows),
        seq_lens=zeros(torch.int32, rows),
        starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        block_tables=zeros(torch.int32, rows, max_blocks),
        before=zeros(torch.int64, rows),
        next_position=zeros(torch.int32, slots),
        active=zeros(torch.bool, slots),
    )


@triton.jit(do_not_specialize=["ahead", "count"])
def _step_kernel(
    row_slots, state, chosen, held, drafts, out, ahead, count, VOCAB: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, TABLE: tl.constexpr, DRAFTS: tl.constexpr, DRAFTS_PAD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Prepare one row. chosen: None where nothing was chosen yet. held: rows may be held and have grammar-forced
    drafts: such rows, and rows in slots from KEPT on, get no guesses.
    """
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    length = tl.where(tl.load(state.alive + slot) != 0, tl.load(state.seq_len + slot), 0)
    # A token at the row's last position ends it, and no block is allocated for a later one.
    room = tl.minimum(int_of(state.parameters, slot, _MAX_POSITION) - length, count)
    # Masks along drafts need the mask worker to know the drafts, which it can't for a head's.
    has_grammar = long_of(state.parameters, slot, _MASK_EPOCH) != 0
    writes = length >= 0
    if held is not None:
        is_held = tl.load(held + slot) != 0
        room = tl.where(is_held | (slot >= KEPT), 0, tl.minimum(room, tl.load(drafts.guesses)))
        writes = (has_grammar == 0) & (is_held == 0)
    room = tl.where((length > 0) & (has_grammar == 0), tl.maximum(room, 0), 0)
    line = state.block_table + slot * TABLE
    if chosen is None:
        token = tl.load(state.last_token + slot)
        n = tl.arange(0, DRAFTS_PAD)
        none = tl.full([DRAFTS_PAD], _NO_DRAFT, tl.int32)
        tl.store(drafts.proposed + slot * DRAFTS + n, none, mask=(n < DRAFTS) & writes)
        tl.store(drafts.drafted + slot, room, mask=writes)
        last = tl.maximum(length - 2, 0)
        index = kv_slots(line, last, (room > 0) & (length > 1), BLOCK_SIZE)
        tl.store(out.before + row, tl.where((room > 0) & (length > 1), index, _NOWHERE))
        covered = tl.where(room > 0, (length + room - 2) // BLOCK_SIZE + 1, 0)
        copy_blocks(line, out.block_tables + row.to(tl.int64) * MAX_BLOCKS, covered, MAX_BLOCKS)
    else:
        token = tl.load(chosen + row).to(tl.int32)
        tl.store(drafts.proposed + slot * DRAFTS + ahead - 1, token, mask=ahead <= room)
    going = ahead < room
    position = tl.maximum(length - 1 + ahead, 0)
    mapping = kv_slots(line, position, going, BLOCK_SIZE)
    tl.store(out.token_ids + row, tl.minimum(tl.maximum(token, 0), VOCAB - 1).to(tl.int64))
    tl.store(out.positions + row, tl.where(going, position, 0).to(tl.int64))
    tl.store(out.slot_mapping + row, tl.where(going, mapping, 0))
    tl.store(out.seq_lens + row, tl.where(going, position + 1, 0))
    tl.store(out.next_position + slot, length + ahead)
    tl.store(out.active + slot, going.to(tl.int8))


def begin_step(
    num_rows: int,
    ahead: int,
    count: int,
    row_slots: torch.Tensor,
    state: RowState,
    drafts: DraftState,
    out: HeadRows,
    block_size: int,
    vocab_size: int,
    chosen: torch.Tensor | None,
    held: torch.Tensor | None = None,
) -> None:
    """Prepare step `ahead` of `count` for the first `num_rows` entries of the row list, all of which decode, and
    propose the previous step's tokens.

    row_slots: int32 [R]. chosen: int64 [num_rows]; None before the first step. With ahead = count there is no further
    step: the last one's tokens are proposed, if any. Ended rows, rows with a grammar and entries past the list take no
    part and get no drafts; nothing is proposed at or beyond a row's end. held: int8 [slots], if rows may be held: held
    rows keep their drafts, and rows with a grammar their forced ones.
    """
    assert 0 <= count <= drafts.most and 0 <= ahead <= count and (chosen is None) == (ahead == 0)
    assert (held is not None) == drafts.holds
    _step_kernel[(num_rows,)](
        row_slots,
        state.columns,
        chosen,
        held,
        drafts,
        out,
        ahead,
        count,
        VOCAB=vocab_size,
        BLOCK_SIZE=block_size,
        MAX_BLOCKS=out.block_tables.shape[1],
        TABLE=state.block_table.shape[1],
        DRAFTS=drafts.most,
        DRAFTS_PAD=triton.next_power_of_2(drafts.most),
        KEPT=drafts.kept_slots,
        num_warps=1,
    )
