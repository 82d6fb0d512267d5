"""The last part of apply: what F runs on, read from the row state on the device. No round trip."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.row_state.state_slots import StateSlots, snapshot_slots
from runahead.runtime.kernels.triton.row_updates.apply_plan import NO_CHUNK, RowList

_TOKEN_TILE: Final = 128
_TABLE_TILE: Final = 256
_NO_CHUNK = tl.constexpr(NO_CHUNK)


@dataclass(frozen=True, slots=True)
class QueryBuffers:
    """Where apply leaves the inputs of F: fixed addresses, so that a captured graph finds them. R rows, T tokens."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    seq_lens: torch.Tensor  # int32 [R]
    block_tables: torch.Tensor  # int32 [R, max_blocks] only what a row's length covers is up to date
    last_query: torch.Tensor  # int64 [R] index of each row's last query token
    # int32 [R] where rows may be held: the row slot that a row's logits go to, the null slot where it leaves none
    logit_slots: torch.Tensor


def make_query_buffers(max_rows: int, max_tokens: int, max_blocks: int, device: torch.device) -> QueryBuffers:
    """Zeroed buffers: every row masked, every token in the null block."""
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
def _queries_kernel(
    counter,
    bulk,
    row_slots,
    query_start_loc,
    chunk_offset,
    alive,
    seq_len,
    last_token,
    block_table,
    parameters,
    token_ids,
    positions,
    slot_mapping,
    seq_lens,
    block_tables,
    last_query,
    lengths,
    state_slots,
    states_read_from,
    states_copied_to,
    replayed,
    copied_after,
    history,
    held,
    drafted,
    sample_slots,
    logit_slots,
    num_rows,
    num_tokens,
    VOCAB: tl.constexpr,
    CONTEXT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    BULK_WORDS: tl.constexpr,
    RAGGED: tl.constexpr,
    HOLDS: tl.constexpr,
    DRAFTS: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCKS: tl.constexpr,
    REPLAYS: tl.constexpr,
    TOKENS: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):
    """One program for a row and a tile of its query tokens. RAGGED: rows have any number of them, and one program more
    takes those that no row has: padding, or all of them where the plan was refused. They must not keep what an earlier
    launch has left."""
    row = tl.program_id(0)
    if RAGGED:
        if row == num_rows:
            unowned = tl.load(query_start_loc + num_rows) + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
            nothing = tl.zeros([TOKENS], tl.int64)
            tl.store(token_ids + unowned, nothing, mask=unowned < num_tokens)
            tl.store(positions + unowned, nothing, mask=unowned < num_tokens)
            tl.store(slot_mapping + unowned, nothing, mask=unowned < num_tokens)
            return
    slot = tl.load(row_slots + row).to(tl.int64)
    is_alive = tl.load(alive + slot) != 0
    if HOLDS:  # a row that is held has been through this F before: its logits and its KV stay as they are
        is_held = tl.load(held + slot) != 0
        if tl.program_id(1) == 0:
            sampled = tl.load(sample_slots + row)
            tl.store(logit_slots + row, tl.where(is_alive & is_held, NULL_SLOT, sampled))
            if DRAFTS:  # a row that goes through this F is held behind it, if it is, without drafts of an F before
                tl.store(drafted + slot, 0, mask=is_held == 0)
        is_alive = is_alive & (is_held == 0)
    length = tl.where(is_alive, tl.load(seq_len + slot), 0)
    count = 1
    start = row
    if RAGGED:
        start = tl.load(query_start_loc + row)
        count = tl.load(query_start_loc + row + 1) - start
    i = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = i < count
    position = tl.maximum(length - count + i, 0)
    token = tl.load(last_token + slot + tl.zeros([TOKENS], tl.int32), mask=inside, other=0)
    offset = tl.load(chunk_offset + row)
    is_chunk = offset != _NO_CHUNK
    prompt = bulk + (tl.load(counter) % SLOTS) * BULK_WORDS + offset
    token = tl.where(is_chunk, tl.load(prompt + i, mask=inside & is_chunk, other=0, volatile=True), token)
    if CONTEXT > 0:
        tl.store(history + slot * CONTEXT + position, token, mask=inside & is_chunk & is_alive)
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
    block = tl.load(block_table + slot * MAX_BLOCKS + position // BLOCK_SIZE, mask=inside & is_alive, other=0)
    tl.store(token_ids + start + i, token.to(tl.int64), mask=inside)
    tl.store(positions + start + i, position.to(tl.int64), mask=inside)
    mapping = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + start + i, mapping, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + row, length)
        snapshot_slots(
            row, slot, length - count, length, parameters, block_table, lengths, state_slots, states_read_from,
            states_copied_to, replayed, copied_after, MAX_BLOCKS, BLOCKS, BLOCK_SIZE, NULL_SLOT, EVERY, REPLAYS,
        )  # fmt: skip
        tl.store(last_query + row, tl.maximum(start + count - 1, 0).to(tl.int64))
        for first in range(0, (length + BLOCK_SIZE - 1) // BLOCK_SIZE, TABLE_TILE):
            j = first + tl.arange(0, TABLE_TILE)
            blocks = tl.load(block_table + slot * MAX_BLOCKS + j, mask=j < MAX_BLOCKS, other=0)
            tl.store(block_tables + row.to(tl.int64) * MAX_BLOCKS + j, blocks, mask=j < MAX_BLOCKS)


def prepare_queries(
    num_rows: int,
    num_tokens: int,
    is_decode: bool,
    counter: torch.Tensor,
    bulk: torch.Tensor,
    rows: RowList,
    state: RowState,
    out: QueryBuffers,
    indexes: StateSlots,
    block_size: int,
    vocab_size: int,
    history: torch.Tensor | None = None,
    held: torch.Tensor | None = None,
    drafted: torch.Tensor | None = None,
) -> None:
    """The query tokens of the first `num_rows` places of the list: a decode row's newest token, a chunk's from the bulk
    slot [slots, bulk_words] of this launch.

    is_decode: every row has one, and num_tokens is `num_rows`. Else both may be more than the plan has. Rows that have
    ended, and places past the list, get seq_len 0 and a slot in the null block, and so do query tokens of no row.
    history: int32 [slots, context], where a drafter wants to know the chunks' tokens by their position. held: int8
    [slots], where rows may be held: those that are have no query token, and leave no logits. drafted: int32 [slots],
    beside `held`, where rows may have drafts: this F has none of the rows that go through it. indexes: of the states
    that the rows go on with.
    """
    assert not is_decode or num_tokens == num_rows
    grid = (num_rows, 1) if is_decode else (num_rows + 1, triton.cdiv(num_tokens, _TOKEN_TILE))
    _queries_kernel[grid](
        counter,
        bulk,
        rows.slots,
        rows.query_start_loc,
        rows.chunk_offset,
        state.alive.view(torch.int8),
        state.seq_len,
        state.last_token,
        state.block_table,
        state.parameters,
        out.token_ids,
        out.positions,
        out.slot_mapping,
        out.seq_lens,
        out.block_tables,
        out.last_query,
        indexes.lengths,
        indexes.slots,
        indexes.read_from,
        indexes.copied_to,
        indexes.replayed,
        indexes.copied_after,
        state.last_token if history is None else history,
        state.last_token if held is None else held,
        state.last_token if drafted is None else drafted,
        rows.sample_slots,
        out.logit_slots,
        num_rows,
        num_tokens,
        VOCAB=vocab_size,
        CONTEXT=0 if history is None else history.shape[1],
        BLOCK_SIZE=block_size,
        MAX_BLOCKS=state.block_table.shape[1],
        SLOTS=bulk.shape[0],
        BULK_WORDS=bulk.shape[1],
        RAGGED=not is_decode,
        HOLDS=held is not None,
        DRAFTS=drafted is not None,
        NULL_SLOT=state.slots - 1,
        EVERY=indexes.snapshot_tokens,
        BLOCKS=indexes.max_blocks,
        REPLAYS=indexes.replays,
        TOKENS=1 if is_decode else _TOKEN_TILE,
        TABLE_TILE=_TABLE_TILE,
        num_warps=1,
    )
