"""Apply, the H2D part of a launch: copies the plan in the staging slot into the row list and the row state.

One program of one warp: in steady decode it reads only the 64 bytes of the header.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.cuda_graphs import rings
from runahead.runtime import plan as layout
from runahead.runtime.kernels.triton.row_state.record import word
from runahead.runtime.kernels.triton.row_updates.admit import admit

_APPEND_TILE = tl.constexpr(32)

_NUMBER = tl.constexpr(layout.HEADER.offset("number"))  # its low half; the high one follows
_ROWS = tl.constexpr(layout.HEADER.offset("rows"))
_ROW_LIST = tl.constexpr(layout.HEADER.offset("row_list"))
_APPENDS = tl.constexpr(layout.HEADER.offset("appends"))
_CHUNKS = tl.constexpr(layout.HEADER.offset("chunks"))
_ADMISSIONS = tl.constexpr(layout.HEADER.offset("admissions"))
_BULK_WORDS = tl.constexpr(layout.HEADER.offset("bulk_words"))
_GUESSES = tl.constexpr(layout.HEADER.offset("guesses"))
_HEADER_WORDS = tl.constexpr(layout.HEADER_WORDS)
_APPEND_WORDS = tl.constexpr(layout.APPEND_WORDS)
_CHUNK_WORDS = tl.constexpr(layout.CHUNK_WORDS)
_CHUNK_ROW = tl.constexpr(layout.CHUNK_ROW)
_CHUNK_START = tl.constexpr(layout.CHUNK_START)
_CHUNK_TOKENS = tl.constexpr(layout.CHUNK_TOKENS)
_CHUNK_OFFSET = tl.constexpr(layout.CHUNK_OFFSET)
_CHUNK_SAMPLES = tl.constexpr(layout.CHUNK_SAMPLES)
_STATUS_FAULT = tl.constexpr(rings.STATUS_FAULT)
_STATUS_BYTES = tl.constexpr(rings.STATUS_BYTES)
_FAULT_NONE = tl.constexpr(rings.FAULT_NONE)
_FAULT_PLAN_NUMBER = tl.constexpr(rings.FAULT_PLAN_NUMBER)
NO_CHUNK: Final = -1
_NO_CHUNK = tl.constexpr(NO_CHUNK)


class RowList(NamedTuple):
    """The newest plan's rows on the device, [R] with R a power of two. Entries past its rows name the null slot."""

    slots: torch.Tensor  # int32 [R] row slots of F
    sample_slots: torch.Tensor  # int32 [R] the same for rows that the next S samples, the null slot for others
    query_start_loc: torch.Tensor  # int32 [R + 1] each row's first query token
    chunk_offset: torch.Tensor  # int32 [R] offset of a chunk's tokens in the bulk slot, or NO_CHUNK


def make_row_list(max_rows: int, device: torch.device) -> RowList:
    """Make an empty list."""
    size = triton.next_power_of_2(max_rows)

    def filled(length: int, value: int) -> torch.Tensor:
        return torch.full((length,), value, dtype=torch.int32, device=device)

    return RowList(filled(size, max_rows), filled(size, max_rows), filled(size + 1, 0), filled(size, NO_CHUNK))


@triton.jit
def apply_plan_kernel(
    counter, plan, bulk, status, row_list, state, penalties, history, held, guesses, SIZES: tl.constexpr
):
    """Apply the running launch's plan to the row list, the row state and the penalties, and write the number of ring
    bytes read to its result slot. A plan with another number masks every row and reports FAULT_PLAN_NUMBER.

    counter: int64 [1], plans applied so far; incremented to this launch's number. plan: int32 [SLOTS, PLAN_WORDS],
    bulk: int32 [SLOTS, BULK_WORDS], status: int32 [SLOTS, STATUS_WORDS], all mapped. history: int32 [row slots,
    CONTEXT], if a drafter reads cached prefixes. held: int8 [row slots], if rows may be held. guesses: int32 [1], if
    grammars force drafts: most guesses of a row in this plan.
    """
    number = tl.load(counter) + 1
    tl.store(counter, number)
    ring = number % SIZES.SLOTS
    body = plan + ring * SIZES.PLAN_WORDS
    header = tl.load(body + tl.arange(0, _HEADER_WORDS), volatile=True)
    planned = (word(header, _NUMBER + 1).to(tl.int64) << 32) | (word(header, _NUMBER).to(tl.int64) & 0xFFFFFFFF)
    valid = planned == number
    rows = tl.where(valid, word(header, _ROWS), 0)
    listed = tl.where(valid, word(header, _ROW_LIST), 1)
    appends = tl.where(valid, word(header, _APPENDS), 0)
    chunks = tl.where(valid, word(header, _CHUNKS), 0)
    admissions = tl.where(valid, word(header, _ADMISSIONS), 0)
    bulk_words = tl.where(valid, word(header, _BULK_WORDS), 0)
    tl.store(status + ring * SIZES.STATUS_WORDS + _STATUS_FAULT, tl.where(valid, _FAULT_NONE, _FAULT_PLAN_NUMBER))
    if guesses is not None:  # of a row's drafts, those not forced by a grammar
        tl.store(guesses, tl.where(valid, word(header, _GUESSES), 0))
    append_list = body + _HEADER_WORDS + rows * listed
    chunk_list = append_list + appends * _APPEND_WORDS
    admission_list = chunk_list + chunks * _CHUNK_WORDS

    for i in range(admissions):
        record = bulk + ring * SIZES.BULK_WORDS + tl.load(admission_list + i, volatile=True)
        admit(record, state, penalties, history, held, SIZES)
    # The next part overwrites what other threads of the warp wrote for an admission.
    tl.debug_barrier()

    for first in range(0, appends, _APPEND_TILE):
        j = first + tl.arange(0, _APPEND_TILE)
        entry = append_list + j * _APPEND_WORDS
        slot = tl.load(entry, mask=j < appends, other=0, volatile=True).to(tl.int64)
        index = tl.load(entry + 1, mask=j < appends, other=0, volatile=True)
        block = tl.load(entry + 2, mask=j < appends, other=0, volatile=True)
        tl.store(state.block_table + slot * SIZES.TABLE + index, block, mask=j < appends)

    r = tl.arange(0, SIZES.ROWS_PAD)
    kept = tl.load(row_list.slots + r)
    sent = tl.load(body + _HEADER_WORDS + r, mask=(r < rows) & (listed == 1), other=SIZES.NULL_SLOT, volatile=True)
    slots = tl.where(listed == 1, sent, kept)
    samples = slots
    counts = tl.where(r < rows, 1, 0)
    offsets = tl.full([SIZES.ROWS_PAD], _NO_CHUNK, tl.int32)
    for c in range(chunks):
        chunk = chunk_list + c * _CHUNK_WORDS
        here = r == tl.load(chunk + _CHUNK_ROW, volatile=True)
        tokens = tl.load(chunk + _CHUNK_TOKENS, volatile=True)
        counts = tl.where(here, tokens, counts)
        offsets = tl.where(here, tl.load(chunk + _CHUNK_OFFSET, volatile=True), offsets)
        skipped = here & (tl.load(chunk + _CHUNK_SAMPLES, volatile=True) == 0)
        samples = tl.where(skipped, SIZES.NULL_SLOT, samples)
        slot = tl.sum(tl.where(here, slots, 0), 0)
        tl.store(state.seq_len + slot, tl.load(chunk + _CHUNK_START, volatile=True) + tokens)
    tl.store(row_list.slots + r, slots)
    tl.store(row_list.sample_slots + r, samples)
    tl.store(row_list.query_start_loc + 1 + r, tl.cumsum(counts, 0))
    tl.store(row_list.chunk_offset + r, offsets)

    words = _HEADER_WORDS + rows * listed + appends * _APPEND_WORDS + chunks * _CHUNK_WORDS + admissions + bulk_words
    tl.store(status + ring * SIZES.STATUS_WORDS + _STATUS_BYTES, words * 4)
