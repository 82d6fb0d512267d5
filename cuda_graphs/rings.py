"""The staging ring (host to device) and the result ring (device to host), in memory that both sides access.

A slot belongs to one launch from the staging of its plan until the launch has retired. The device finds its slot by its
launch counter, never by an address in a captured graph. The host reads S's decisions from a launch's result cells, as
columns over its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

# A result cell is one aligned 64-bit store: the launch number modulo 2**32 in the high half, S's decision in the low
# half. The number wraps around, and is compared in its wrapped form. A cell that was not written yet has the number
# of an earlier launch.
TOKEN_MASK = (1 << 26) - 1
FORCED = 1 << 6  # in `drafted`
NOTHING_LEFT = 1 << 26  # the row's grammar allows no token: the device ended the row, the token is meaningless
HELD = 1 << 27  # the mask of the row's next token is missing: the row brings no token and goes on
STOPPED = 1 << 28  # the device ended the row with this token
VOID = 1 << 29  # the row had ended before this launch: nothing was sampled
NON_FINITE = 1 << 30  # the row's logits had a NaN or an infinity: the device ended the row, the token is meaningless

# Words of a result slot's `status`.
STATUS_FAULT = 0  # 0, or one of the codes below
STATUS_BYTES = 1  # bytes that apply read from the rings, where only the device can count them
STATUS_WORDS = 4

FAULT_NONE = 0
FAULT_PLAN_NUMBER = 1  # apply found a plan that was not the one for its launch: every row was masked

_NONE: Final = np.zeros(0, np.intp)


class CellError(RuntimeError):
    """A launch's result cells contradict each other or its number: the device or the engine has a bug."""


def low_word(number: int) -> int:
    """Return a launch number modulo 2**32, as the signed 32-bit word in a cell's high half."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def cell_tag(number: int) -> int:
    """Return the high half of a launch's cells, shifted into place."""
    return low_word(number) << 32


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Sizes of both rings.

    slots: `run_ahead` + 2.
    plan_words: int32 words of a plan slot (2,048 = 8 KiB).
    bulk_words: int32 words of a bulk slot (prompt tokens and admission records of mixed launches).
    rows: most rows in a launch.
    max_top: most alternatives whose log-probabilities a row may ask for.
    drafts: tokens that a launch may keep of a row in addition to the one that it samples.
    prompt_tokens: query tokens of a launch, all drafts included, whose prompt log-probabilities can be left.
    """

    slots: int
    plan_words: int
    bulk_words: int
    rows: int
    max_top: int
    drafts: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RingMemory:
    """Both rings, as the host sees them: NumPy views; on CUDA the memory is pinned and mapped.

    S's results (cells, logprob, top_ids, top_logprobs, drafted) are readable once the launch is sampled. F's results
    (finite, prompt_*) are readable once it has ended. Entry j of prompt_* belongs to query token j of F, in the order
    of `query_start_loc`, and has the log-probability of the prompt's next token; each decoding row counts with all
    drafts of the launch, proposed or not. Only rows that asked for prompt log-probabilities leave entries; the last
    query token of a row's last chunk has none, since no prompt token follows.
    """

    layout: RingLayout
    plan: NDArray[np.int32]  # [slots, plan_words]
    bulk: NDArray[np.int32]  # [slots, bulk_words]
    cells: NDArray[np.int64]  # [slots, rows, 1 + drafts]
    logprob: NDArray[np.float32]  # [slots, rows, 1 + drafts] of the chosen token
    top_ids: NDArray[np.int32]  # [slots, rows, 1 + drafts, max_top]
    top_logprobs: NDArray[np.float32]  # [slots, rows, 1 + drafts, max_top]
    # [slots, rows] verified drafts of the row, if F had some; FORCED is added if a grammar forced
    # them.
    drafted: NDArray[np.int8]
    finite: NDArray[np.int8]  # [slots, rows] by index in F's row list: 1 if all final hidden states are finite
    prompt_logprob: NDArray[np.float32]  # [slots, prompt_tokens] of the prompt's next token
    prompt_top_ids: NDArray[np.int32]  # [slots, prompt_tokens, max_top]
    prompt_top_logprobs: NDArray[np.float32]  # [slots, prompt_tokens, max_top]
    status: NDArray[np.int32]  # [slots, STATUS_WORDS]
    start_ns: NDArray[np.int64]  # [slots] the device's clock when S began
    end_ns: NDArray[np.int64]  # [slots] the device's clock when F ended
    idle_ns: NDArray[np.int64]  # [slots] most time between these two without work on the device
    rank_stamps: NDArray[np.int64]  # [ranks - 1, 2, slots] start_ns and end_ns of tensor-parallel ranks from 1 on
    rank_waited_ns: NDArray[np.int64]  # [ranks] waiting for other ranks within launches so far; empty with one rank

    def slot(self, number: int) -> int:
        """Return the slot of a launch, the same on the host and on the device."""
        return number % self.layout.slots


class Allocate(Protocol):
    """Makes one zeroed array; CUDA's makes it pinned."""

    def __call__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]: ...


def zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Return ordinary host memory."""
    return np.zeros(shape, dtype)


def allocate_rings(layout: RingLayout, allocate: Allocate = zeros) -> RingMemory:
    """Return both rings of `layout`, with every array made by `allocate`."""
    slots, rows, top, tokens = layout.slots, layout.rows, layout.max_top, layout.prompt_tokens
    cells = 1 + layout.drafts
    return RingMemory(
        layout=layout,
        plan=allocate((slots, layout.plan_words), np.int32),  # type: ignore[arg-type]
        bulk=allocate((slots, layout.bulk_words), np.int32),  # type: ignore[arg-type]
        cells=allocate((slots, rows, cells), np.int64),  # type: ignore[arg-type]
        logprob=allocate((slots, rows, cells), np.float32),  # type: ignore[arg-type]
        top_ids=allocate((slots, rows, cells, top), np.int32),  # type: ignore[arg-type]
        top_logprobs=allocate((slots, rows, cells, top), np.float32),  # type: ignore[arg-type]
        drafted=allocate((slots, rows), np.int8),  # type: ignore[arg-type]
        finite=allocate((slots, rows), np.int8),  # type: ignore[arg-type]
        prompt_logprob=allocate((slots, tokens), np.float32),  # type: ignore[arg-type]
        prompt_top_ids=allocate((slots, tokens, top), np.int32),  # type: ignore[arg-type]
        prompt_top_logprobs=allocate((slots, tokens, top), np.float32),  # type: ignore[arg-type]
        status=allocate((slots, STATUS_WORDS), np.int32),  # type: ignore[arg-type]
        start_ns=allocate((slots,), np.int64),  # type: ignore[arg-type]
        end_ns=allocate((slots,), np.int64),  # type: ignore[arg-type]
        idle_ns=allocate((slots,), np.int64),  # type: ignore[arg-type]
        rank_stamps=np.zeros((0, 2, slots), np.int64),
        rank_waited_ns=np.zeros(0, np.int64),
    )


def ring_bytes(layout: RingLayout) -> int:
    """Return the bytes of both rings, without allocating them."""
    sizes: list[int] = []

    def counted(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
        sizes.append(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.zeros(0, dtype)

    allocate_rings(layout, counted)
    return sum(sizes)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Columns over a launch's tokens, row by row, each row's tokens in order."""

    row: NDArray[np.intp] | slice  # [n] index of the token's row among the rows read; a slice: one token each
    offset: NDArray[np.intp] | int  # [n] its index among the row's tokens of this launch
    token: NDArray[np.int32]  # [n]
    stopped: NDArray[np.bool_]  # [n] the device ended the row with this token
    failed: NDArray[np.bool_]  # [n] the row ended without a token; `token` is meaningless
    nothing_left: NDArray[np.bool_]  # [n] no token was allowed; False, with `failed`: its logits were not finite
    held: NDArray[np.intp]  # [held] indexes of the rows that were read and held


def only_tokens(cells: NDArray[np.int64], number: int) -> NDArray[np.int32] | None:
    """Return the tokens, [n], of cells, [n, 1 + K], that have no drafts.

    None if K is not 0 or a cell has more than this launch's number and a token.
    """
    if cells.shape[1] > 1:
        return None
    words = cells[:, 0] ^ cell_tag(number)
    return None if int(np.bitwise_or.reduce(words)) & ~TOKEN_MASK else words.astype(np.int32)


def read_cells(cells: NDArray[np.int64], number: int) -> SampledTokens:
    """Return the tokens in the cells, [rows, 1 + K], of rows that go on: for each row its first cell and the accepted
    drafts. A held row has none.

    cells: contiguous.

    Raises CellError if a cell is another launch's, a row has no token and is not held, a token follows a gap or an
    end, or a held row has more than its flag.
    """
    if (tokens := only_tokens(cells, number)) is not None:
        none = np.zeros(tokens.size, np.bool_)
        return SampledTokens(slice(None), 0, tokens, stopped=none, failed=none, nothing_left=none, held=_NONE)
    words = cells.view(np.int32)  # the low half of a cell comes first
    if np.count_nonzero(words[:, 1::2] != low_word(number)):
        raise CellError(f"launch {number}: its result slot holds another launch's tokens")
    low = words[:, 0::2]
    if np.count_nonzero(low[:, 0] & VOID):
        raise CellError(f"launch {number}: the device ended a row that goes on")
    held = (low[:, 0] & HELD).nonzero()[0]
    if np.count_nonzero(low[held, 0] != HELD) or np.count_nonzero(low[:, 1:] & HELD):
        raise CellError(f"launch {number}: a row is held and has a token or an end")
    several = low.shape[1] > 1 or held.size
    row, offset, found = _accepted(low, number) if several else (slice(None), 0, low[:, 0])
    return SampledTokens(
        row,
        offset,
        found & TOKEN_MASK,
        stopped=(found & STOPPED) != 0,
        failed=(found & (NON_FINITE | NOTHING_LEFT)) != 0,
        nothing_left=(found & NOTHING_LEFT) != 0,
        held=held,
    )


def _accepted(low: NDArray[np.int32], number: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int32]]:
    """Return rows, offsets and words of the cells, [rows, 1 + K], that have tokens."""
    there = (low & (VOID | HELD)) == 0
    if np.count_nonzero(there[:, 1:] & (~there[:, :-1] | ((low[:, :-1] & STOPPED) != 0))):
        raise CellError(f"launch {number}: a token follows a gap or the end of its row")
    row, offset = there.nonzero()
    return row, offset, low[row, offset]
