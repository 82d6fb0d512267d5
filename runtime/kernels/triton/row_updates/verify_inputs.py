"""The last part of apply in a launch that verifies drafts: a row's newest token and drafts as F's query tokens."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.row_state.drafts import DraftState
from runahead.runtime.kernels.triton.row_state.state_slots import StateSlots, snapshot_slots

_TABLE_TILE = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _verify_inputs_kernel(
    row_slots, state, drafts, held, states, num_rows, width, VOCAB: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, TABLE: tl.constexpr, MOST: tl.constexpr, WIDTH_PAD: tl.constexpr, ROWS_PAD: tl.constexpr,
    NULL_SLOT: tl.constexpr, KEPT: tl.constexpr, EVERY: tl.constexpr, REPLAYS: tl.constexpr,
):  # fmt: skip
    """Prepare one token of a row's run: the first program of a row writes everything but the others' block tables.
    TABLE: words of a row's line of the block table, the first MAX_BLOCKS of them blocks.

    held: rows may be held. A held row has been through an F with its drafts: it has one query token of length 0, and
    the next S finds its run where that F wrote it. KEPT: number of the lowest row slots that have drafts.
    """
    row, number = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, ROWS_PAD)
    slots = tl.load(row_slots + r, mask=r < num_rows, other=NULL_SLOT)
    looked_at = tl.load(drafts.drafted + slots)
    if held is not None:
        looked_at = tl.where(tl.load(held + slots) != 0, 0, looked_at)
    counts = tl.where(r < num_rows, 1 + looked_at, 0)
    start = tl.sum(tl.where(r < row, counts, 0), 0)
    own = row < num_rows
    slot = tl.load(row_slots + row, mask=own, other=NULL_SLOT).to(tl.int64)
    count = tl.where(own, 1 + tl.load(drafts.drafted + slot), 0)
    is_alive = tl.load(state.alive + slot) != 0
    if held is not None:
        looked_at_next = tl.minimum(count, width)
        is_held = tl.load(held + slot) != 0
        is_alive = is_alive & (is_held == 0)
        count = tl.where(is_held, tl.minimum(count, 1), count)
    length = tl.where(is_alive, tl.load(state.seq_len + slot), 0)
    n = tl.arange(0, WIDTH_PAD)
    there = n < count
    if number == 0:
        line = start + n
        token = tl.load(drafts.proposed + slot * MOST + n - 1, mask=there & (n > 0), other=0)
        token = tl.where(n == 0, tl.load(state.last_token + slot), token)
        token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
        position = tl.maximum(length - 1 + n, 0)
        block = tl.load(state.block_table + slot * TABLE + position // BLOCK_SIZE, mask=there & is_alive, other=0)
        tl.store(drafts.token_ids + line, token.to(tl.int64), mask=there)
        tl.store(drafts.positions + line, position.to(tl.int64), mask=there)
        mapping = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(drafts.slot_mapping + line, mapping, mask=there)
        tl.store(drafts.token_lens + line, tl.where(is_alive, length + n, 0), mask=there)
        if held is not None:
            kept_at = slot + tl.where(n > 0, NULL_SLOT + 1 + (n - 1) * KEPT, 0)
            tl.store(drafts.logits_slots + line, tl.where(is_held, NULL_SLOT, kept_at).to(tl.int32), mask=there)
        # Unused query tokens come last: this row's after those of earlier rows.
        spare = (n >= count) & (n < width) & own
        line = tl.sum(counts, 0) + tl.sum(tl.where(r < row, width - counts, 0), 0) + n - count
        tl.store(drafts.token_ids + line, tl.zeros([WIDTH_PAD], tl.int64), mask=spare)
        tl.store(drafts.positions + line, tl.zeros([WIDTH_PAD], tl.int64), mask=spare)
        tl.store(drafts.slot_mapping + line, tl.zeros([WIDTH_PAD], tl.int64), mask=spare)
        tl.store(drafts.token_lens + line, tl.zeros([WIDTH_PAD], tl.int32), mask=spare)
        if held is not None:
            tl.store(drafts.logits_slots + line, tl.full([WIDTH_PAD], NULL_SLOT, tl.int32), mask=spare)
        # The next S may read more rows than this F has: the others get no token.
        index = row * width + n
        in_run, found_at = there, start + n
        if held is not None:
            in_run, found_at = n < looked_at_next, kept_at.to(tl.int32)
        tl.store(drafts.verify_slots + index, tl.where(in_run, slot, NULL_SLOT).to(tl.int32), mask=n < width)
        tl.store(drafts.verify_logits + index, tl.where(in_run, found_at, 0), mask=n < width)
        tl.store(drafts.seq_lens + row, tl.where(is_alive, length + count - 1, 0), mask=own)
        tl.store(drafts.query_start_loc + row + 1, start + count, mask=own)
        if REPLAYS:  # only the newest token is certain
            snapshot_slots(
                row, slot, length - 1, length, state, states, TABLE, MAX_BLOCKS, BLOCK_SIZE, NULL_SLOT, EVERY, REPLAYS
            )
    copied = own & (number < count)
    target = start + number
    for first in range(0, tl.where(copied, (length + number + BLOCK_SIZE - 1) // BLOCK_SIZE, 0), _TABLE_TILE):
        i = first + tl.arange(0, _TABLE_TILE)
        blocks = tl.load(state.block_table + slot * TABLE + i, mask=i < MAX_BLOCKS, other=0)
        tl.store(drafts.block_tables + target.to(tl.int64) * MAX_BLOCKS + i, blocks, mask=i < MAX_BLOCKS)


def prepare_verified(
    num_rows: int, width: int, row_slots: torch.Tensor, state: RowState, drafts: DraftState, indexes: StateSlots,
    block_size: int, vocab_size: int, held: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Prepare the num_rows * width query tokens of F, and the indexes of their logits for the next S, after the
    drafter's proposals.

    row_slots: int32 [R] of the row list, the first `num_rows` used. width: 1 + K of the launch. indexes: the states
    that rows continue from. Ended rows and entries past the list have one query token of length 0. held: int8 [slots],
    if rows may be held: a held row has one too, and the next S finds the run that it was held with.
    """
    assert (held is not None) == drafts.holds
    _verify_inputs_kernel[(drafts.rows, width)](
        row_slots,
        state.columns,
        drafts,
        held,
        indexes,
        num_rows,
        width,
        VOCAB=vocab_size,
        BLOCK_SIZE=block_size,
        MAX_BLOCKS=drafts.block_tables.shape[1],
        TABLE=state.block_table.shape[1],
        MOST=drafts.most,
        WIDTH_PAD=triton.next_power_of_2(1 + drafts.most),
        ROWS_PAD=triton.next_power_of_2(drafts.rows),
        NULL_SLOT=state.slots - 1,
        KEPT=drafts.kept_slots,
        EVERY=indexes.snapshot_tokens,
        REPLAYS=indexes.replays,
        num_warps=1,
    )
