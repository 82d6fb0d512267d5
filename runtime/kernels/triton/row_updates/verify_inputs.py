"""The last part of apply in a launch that verifies drafts: a row's newest token and drafts as F's query tokens."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.attention.block_table import copy_blocks, kv_slots
from runahead.runtime.kernels.triton.row_state.state_slots import snapshot_slots


@triton.jit(do_not_specialize=["num_rows", "width"])
def verify_inputs_kernel(row_slots, state, drafts, held, states, num_rows, width, SIZES: tl.constexpr):
    """Prepare one token of a row's run: the first program of a row writes everything but the others' block tables.

    row_slots: int32 [R] of the row list, the first `num_rows` used. width: 1 + K of the launch. Ended rows and entries
    past the list have one query token of length 0. held: int8 [slots], if rows may be held. A held row has been through
    an F with its drafts: it has one query token of length 0, and the next S finds its run where that F wrote it.
    """
    row, number = tl.program_id(0), tl.program_id(1)
    RUN_PAD: tl.constexpr = SIZES.RUN_PAD
    r = tl.arange(0, SIZES.DRAFT_ROWS_PAD)
    slots = tl.load(row_slots + r, mask=r < num_rows, other=SIZES.NULL_SLOT)
    verified = tl.load(drafts.drafted + slots)
    if held is not None:
        verified = tl.where(tl.load(held + slots) != 0, 0, verified)
    counts = tl.where(r < num_rows, 1 + verified, 0)
    start = tl.sum(tl.where(r < row, counts, 0), 0)
    own = row < num_rows
    slot = tl.load(row_slots + row, mask=own, other=SIZES.NULL_SLOT).to(tl.int64)
    count = tl.where(own, 1 + tl.load(drafts.drafted + slot), 0)
    is_alive = tl.load(state.alive + slot) != 0
    if held is not None:
        verified_next = tl.minimum(count, width)
        is_held = tl.load(held + slot) != 0
        is_alive = is_alive & (is_held == 0)
        count = tl.where(is_held, tl.minimum(count, 1), count)
    length = tl.where(is_alive, tl.load(state.seq_len + slot), 0)
    n = tl.arange(0, RUN_PAD)
    there = n < count
    if number == 0:
        line = start + n
        token = tl.load(drafts.proposed + slot * SIZES.DRAFTS + n - 1, mask=there & (n > 0), other=0)
        token = tl.where(n == 0, tl.load(state.last_token + slot), token)
        token = tl.minimum(tl.maximum(token, 0), SIZES.VOCAB - 1)
        position = tl.maximum(length - 1 + n, 0)
        mapping = kv_slots(state.block_table + slot * SIZES.TABLE, position, there & is_alive, SIZES.BLOCK_SIZE)
        tl.store(drafts.token_ids + line, token.to(tl.int64), mask=there)
        tl.store(drafts.positions + line, position.to(tl.int64), mask=there)
        tl.store(drafts.slot_mapping + line, mapping, mask=there)
        tl.store(drafts.token_lens + line, tl.where(is_alive, length + n, 0), mask=there)
        if held is not None:
            kept_at = slot + tl.where(n > 0, SIZES.NULL_SLOT + 1 + (n - 1) * SIZES.KEPT, 0)
            tl.store(drafts.logits_slots + line, tl.where(is_held, SIZES.NULL_SLOT, kept_at).to(tl.int32), mask=there)
        # Unused query tokens come last, in the order of rows.
        spare = (n >= count) & (n < width) & own
        line = tl.sum(counts, 0) + tl.sum(tl.where(r < row, width - counts, 0), 0) + n - count
        tl.store(drafts.token_ids + line, tl.zeros([RUN_PAD], tl.int64), mask=spare)
        tl.store(drafts.positions + line, tl.zeros([RUN_PAD], tl.int64), mask=spare)
        tl.store(drafts.slot_mapping + line, tl.zeros([RUN_PAD], tl.int64), mask=spare)
        tl.store(drafts.token_lens + line, tl.zeros([RUN_PAD], tl.int32), mask=spare)
        if held is not None:
            tl.store(drafts.logits_slots + line, tl.full([RUN_PAD], SIZES.NULL_SLOT, tl.int32), mask=spare)
        # The next S may read more rows than this F has: the others get no token.
        index = row * width + n
        in_run, found_at = there, start + n
        if held is not None:
            in_run, found_at = n < verified_next, kept_at.to(tl.int32)
        tl.store(drafts.verify_slots + index, tl.where(in_run, slot, SIZES.NULL_SLOT).to(tl.int32), mask=n < width)
        tl.store(drafts.verify_logits + index, tl.where(in_run, found_at, 0), mask=n < width)
        tl.store(drafts.seq_lens + row, tl.where(is_alive, length + count - 1, 0), mask=own)
        tl.store(drafts.query_start_loc + row + 1, start + count, mask=own)
        if SIZES.REPLAYS:  # only the newest token is certain
            snapshot_slots(row, slot, length - 1, length, state, states, SIZES)
    copied = own & (number < count)
    target = start + number
    covered = (length + number + SIZES.BLOCK_SIZE - 1) // SIZES.BLOCK_SIZE
    to = drafts.block_tables + target.to(tl.int64) * SIZES.BLOCKS
    copy_blocks(state.block_table + slot * SIZES.TABLE, to, tl.where(copied, covered, 0), SIZES.BLOCKS)
