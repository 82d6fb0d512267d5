"""The last part of apply: prepares F's inputs from the row state on the device, without a round trip."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.row_state.state_slots import StateSlots, snapshot_slots
from runahead.runtime.kernels.triton.row_updates.apply_plan import NO_CHUNK, RowList

_TOKEN_TILE: Final = 128
_TABLE_TILE = tl.constexpr(256)
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
def _queries_kernel(
    counter, bulk, rows, state, out, states, history, held, drafted, num_rows, num_tokens, VOCAB: tl.constexpr,
    CONTEXT: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAX_BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
    BULK_WORDS: tl.constexpr, RAGGED: tl.constexpr, NULL_SLOT: tl.constexpr, EVERY: tl.constexpr, BLOCKS: tl.constexpr,
    REPLAYS: tl.constexpr, TOKENS: tl.constexpr,
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
            tl.store(out.logit_slots + row, tl.where(is_alive & is_held, NULL_SLOT, sampled))
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
    prompt = bulk + (tl.load(counter) % SLOTS) * BULK_WORDS + offset
    token = tl.where(is_chunk, tl.load(prompt + i, mask=inside & is_chunk, other=0, volatile=True), token)
    if history is not None:
        tl.store(history + slot * CONTEXT + position, token, mask=inside & is_chunk & is_alive)
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
    block = tl.load(state.block_table + slot * MAX_BLOCKS + position // BLOCK_SIZE, mask=inside & is_alive, other=0)
    tl.store(out.token_ids + start + i, token.to(tl.int64), mask=inside)
    tl.store(out.positions + start + i, position.to(tl.int64), mask=inside)
    mapping = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(out.slot_mapping + start + i, mapping, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out.seq_lens + row, length)
        snapshot_slots(
            row, slot, length - count, length, state, states, MAX_BLOCKS, BLOCKS, BLOCK_SIZE, NULL_SLOT, EVERY, REPLAYS
        )
        tl.store(out.last_query + row, tl.maximum(start + count - 1, 0).to(tl.int64))
        for first in range(0, (length + BLOCK_SIZE - 1) // BLOCK_SIZE, _TABLE_TILE):
            j = first + tl.arange(0, _TABLE_TILE)
            blocks = tl.load(state.block_table + slot * MAX_BLOCKS + j, mask=j < MAX_BLOCKS, other=0)
            tl.store(out.block_tables + row.to(tl.int64) * MAX_BLOCKS + j, blocks, mask=j < MAX_BLOCKS)


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
    """Prepare the query tokens of the list's first `num_rows` entries: a decode row's newest token, a chunk's from this
    launch's bulk slot, [slots, bulk_words].

    is_decode: every row has one, and num_tokens is `num_rows`; otherwise both may exceed the plan's. Ended rows and
        entries past the list get seq_len 0 and a slot in the null block, like query tokens of no row.
    history: int32 [slots, context], if a drafter reads chunks' tokens by position. held: int8 [slots], if rows may be
        held: held rows have no query token and write no logits. drafted: int32 [slots], with `held` if rows may have
        drafts; reset for rows of this F. indexes: the states that rows continue from.
    """
    assert not is_decode or num_tokens == num_rows
    grid = (num_rows, 1) if is_decode else (num_rows + 1, triton.cdiv(num_tokens, _TOKEN_TILE))
    _queries_kernel[grid](
        counter,
        bulk,
        rows,
        state.columns,
        out,
        indexes,
        history,
        held,
        drafted,
        num_rows,
        num_tokens,
        VOCAB=vocab_size,
        CONTEXT=0 if history is None else history.shape[1],
        BLOCK_SIZE=block_size,
        MAX_BLOCKS=state.block_table.shape[1],
        SLOTS=bulk.shape[0],
        BULK_WORDS=bulk.shape[1],
        RAGGED=not is_decode,
        NULL_SLOT=state.slots - 1,
        EVERY=indexes.snapshot_tokens,
        BLOCKS=indexes.max_blocks,
        REPLAYS=indexes.replays,
        TOKENS=1 if is_decode else _TOKEN_TILE,
        num_warps=1,
    )
