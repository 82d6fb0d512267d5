"""The last part of apply: prepares F's inputs from the row state on the device, without a round trip."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.attention.block_table import copy_blocks, kv_slots
from runahead.runtime.kernels.triton.row_state.state_slots import snapshot_slots
from runahead.runtime.kernels.triton.row_updates.apply_plan import NO_CHUNK

TOKEN_TILE: Final = 128
_NO_CHUNK = tl.constexpr(NO_CHUNK)


class QueryBuffers(NamedTuple):
    """F's inputs at fixed addresses, as captured graphs need. R rows, T tokens."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    seq_lens: torch.Tensor  # int32 [R]
    block_tables: torch.Tensor  # int32 [R, max_blocks] valid up to each row's length
    last_query: torch.Tensor  # int64 [R] index of each row's last query token
    # int32 [R] if rows may be held: the row slot for a row's logits, the null slot if it writes none
    logit_slots: torch.Tensor


def make_query_buffers(max_rows: int, max_tokens: int, max_blocks: int, device: torch.device) -> QueryBuffers:
    """Make zeroed buffers: every row masked, every token in the null block."""
    rows = triton.next_power_of_2(max_rows)
    tokens = max(max_tokens, rows)

    def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return QueryBuffers(
        token_ids=zeros(torch.int64, tokens),
        positions=zeros(torch.int64, tokens),
        slot_mapping=zeros(torch.int64, tokens),
        seq_lens=zeros(torch.int32, rows),
        block_tables=zeros(torch.int32, rows, max_blocks),
        last_query=zeros(torch.int64, rows),
        logit_slots=torch.full((rows,), max_rows, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def queries_kernel(
    counter, bulk, rows, state, out, states, history, held, drafted, num_rows, num_tokens, SIZES: tl.constexpr,
    RAGGED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Prepare one row's tile of query tokens. RAGGED: rows have different numbers of them, and one more program resets
    tokens of no row (padding, or all if the plan was refused), so that they keep nothing of an earlier launch.
    """
    row = tl.program_id(0)
    if RAGGED:
        if row == num_rows:
            unowned = tl.load(rows.query_start_loc + num_rows) + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
            nothing = tl.zeros([TOKENS], tl.int64)
            tl.store(out.token_ids + unowned, nothing, mask=unowned < num_tokens)
            tl.store(out.positions + unowned, nothing, mask=unowned < num_tokens)
            tl.store(out.slot_mapping + unowned, nothing, mask=unowned < num_tokens)
            return
    slot = tl.load(rows.slots + row).to(tl.int64)
    is_alive = tl.load(state.alive + slot) != 0
    if held is not None:  # a held row has been through this F before: its logits and KV stay
        is_held = tl.load(held + slot) != 0
        if tl.program_id(1) == 0:
            sampled = tl.load(rows.sample_slots + row)
            tl.store(out.logit_slots + row, tl.where(is_alive & is_held, SIZES.NULL_SLOT, sampled))
            if drafted is not None:  # if the row is held after this F, it has no drafts of an earlier one
                tl.store(drafted + slot, 0, mask=is_held == 0)
        is_alive = is_alive & (is_held == 0)
    length = tl.where(is_alive, tl.load(state.seq_len + slot), 0)
    count = 1
    start = row
    if RAGGED:
        start = tl.load(rows.query_start_loc + row)
        count = tl.load(rows.query_start_loc + row + 1) - start
    i = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = i < count
    position = tl.maximum(length - count + i, 0)
    token = tl.load(state.last_token + slot + tl.zeros([TOKENS], tl.int32), mask=inside, other=0)
    offset = tl.load(rows.chunk_offset + row)
    is_chunk = offset != _NO_CHUNK
    prompt = bulk + (tl.load(counter) % SIZES.SLOTS) * SIZES.BULK_WORDS + offset
    token = tl.where(is_chunk, tl.load(prompt + i, mask=inside & is_chunk, other=0, volatile=True), token)
    if history is not None:
        tl.store(history + slot * SIZES.CONTEXT + position, token, mask=inside & is_chunk & is_alive)
    token = tl.minimum(tl.maximum(token, 0), SIZES.VOCAB - 1)
    line = state.block_table + slot * SIZES.TABLE
    mapping = kv_slots(line, position, inside & is_alive, SIZES.BLOCK_SIZE)
    tl.store(out.token_ids + start + i, token.to(tl.int64), mask=inside)
    tl.store(out.positions + start + i, position.to(tl.int64), mask=inside)
    tl.store(out.slot_mapping + start + i, mapping, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out.seq_lens + row, length)
        snapshot_slots(row, slot, length - count, length, state, states, SIZES)
        tl.store(out.last_query + row, tl.maximum(start + count - 1, 0).to(tl.int64))
        covered = (length + SIZES.BLOCK_SIZE - 1) // SIZES.BLOCK_SIZE
        copy_blocks(line, out.block_tables + row.to(tl.int64) * SIZES.TABLE, covered, SIZES.TABLE)
