"""A row's parameters in a kernel: one pointer to int32 [slots, ADMIT_WORDS], and the place of each field in a line."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.row_record import ADMIT_WORDS, ROW_RECORD

ROW_WORDS = tl.constexpr(ADMIT_WORDS)


@triton.jit
def word(words, index: tl.constexpr):
    """One word of a header that is in registers."""
    return tl.sum(tl.where(tl.arange(0, words.shape[0]) == index, words, 0), 0)


def offset_of(name: str) -> tl.constexpr:
    """The word of a field of `runahead.runtime.row_record.RowParameters`, for kernels."""
    return tl.constexpr(ROW_RECORD.offset(name))


@triton.jit
def int_of(parameters, slot, WORD: tl.constexpr):
    """A field of 32 bits of a row, or of each of a tensor of rows."""
    return tl.load(parameters + slot * ROW_WORDS + WORD)


@triton.jit
def float_of(parameters, slot, WORD: tl.constexpr):
    """A float32 field."""
    return int_of(parameters, slot, WORD).to(tl.float32, bitcast=True)


@triton.jit
def long_of(parameters, slot, WORD: tl.constexpr):
    """A field of 64 bits."""
    low = int_of(parameters, slot, WORD).to(tl.int64) & 0xFFFFFFFF
    return (int_of(parameters, slot, WORD + 1).to(tl.int64) << 32) | low
