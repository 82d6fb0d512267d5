"""Access to a row's parameters in kernels: a pointer to int32 [slots, ADMIT_WORDS], and each field's offset in a
line.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from runahead.runtime.row_record import ADMIT_WORDS, ROW_RECORD

ROW_WORDS = tl.constexpr(ADMIT_WORDS)


class RowSizes(NamedTuple):
    """Constants of the kernels that update rows."""

    SLOTS: int  # launches of the rings
    PLAN_WORDS: int
    BULK_WORDS: int
    STATUS_WORDS: int
    RING_ROWS: int
    CELLS: int  # of a row in a result slot
    MAX_TOP: int
    TOP_PAD: int
    VOCAB: int
    CONTEXT: int  # tokens of a row's history; 0: no drafter reads one
    BLOCK_SIZE: int
    BLOCKS: int  # of a row
    TABLE: int  # words of a row's line of the block table: blocks, then snapshots
    NULL_SLOT: int
    ROWS_PAD: int  # entries of the row list
    MAX_STOP_IDS: int
    MAX_BIAS: int
    ALLOWED_WORDS: int
    SNAPSHOT_TOKENS: int  # between two boundaries with a snapshot; 0: none
    REPLAYS: bool  # rows have states and drafts
    DRAFTS: int  # most drafts of a row
    DRAFTS_PAD: int
    RUN_PAD: int  # query tokens of a row with drafts
    DRAFT_ROWS_PAD: int  # rows of a launch that verifies drafts
    KEPT: int  # number of the lowest row slots whose drafts are kept; 0: no row may be held


@triton.jit
def word(words, index):
    """Extract one number of a vector in registers, such as a header; 0 outside."""
    return tl.sum(tl.where(tl.arange(0, words.shape[0]) == index, words, 0), 0)


def offset_of(name: str) -> tl.constexpr:
    """Return the word offset of a `runahead.runtime.row_record.RowParameters` field as a constexpr."""
    return tl.constexpr(ROW_RECORD.offset(name))


@triton.jit
def int_of(parameters, slot, WORD: tl.constexpr):
    """Load a 32-bit field of a row, or of each row of a tensor."""
    return tl.load(parameters + slot * ROW_WORDS + WORD)


@triton.jit
def float_of(parameters, slot, WORD: tl.constexpr):
    """Load a float32 field."""
    return int_of(parameters, slot, WORD).to(tl.float32, bitcast=True)


@triton.jit
def long_of(parameters, slot, WORD: tl.constexpr):
    """Load a 64-bit field."""
    low = int_of(parameters, slot, WORD).to(tl.int64) & 0xFFFFFFFF
    return (int_of(parameters, slot, WORD + 1).to(tl.int64) << 32) | low
