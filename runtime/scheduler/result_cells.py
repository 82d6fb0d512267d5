"""Reads S's decisions from a launch's result cells, as columns over its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import HELD, NON_FINITE, NOTHING_LEFT, STOPPED, TOKEN_MASK, VOID, cell_tag, low_word
from runahead.runtime.scheduler.ledger import LedgerError
from runahead.runtime.scheduler.rows import Rows

_NONE: Final = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Columns over a launch's tokens, row by row, each row's tokens in order."""

    row: NDArray[np.intp] | slice  # [n] index of the token's row among the rows read; a slice: one token each
    offset: NDArray[np.intp] | int  # [n] its index among the row's tokens of this launch
    token: NDArray[np.int32]  # [n]
    stopped: NDArray[np.bool_]  # [n] the device ended the row with this token
    failed: NDArray[np.bool_]  # [n] the row ended without a token; `token` is meaningless
    nothing_left: NDArray[
        np.bool_
    ]  # [n] it ended because no token was allowed; else because its logits were not finite
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

    Raises LedgerError if a cell is another launch's, a row has no token and is not held, a token follows a gap or an
    end, or a held row has more than its flag.
    """
    if (tokens := only_tokens(cells, number)) is not None:
        none = np.zeros(tokens.size, np.bool_)
        return SampledTokens(slice(None), 0, tokens, stopped=none, failed=none, nothing_left=none, held=_NONE)
    words = cells.view(np.int32)  # the low half of a cell comes first
    if np.count_nonzero(words[:, 1::2] != low_word(number)):
        raise LedgerError(f"launch {number}: its result slot holds another launch's tokens")
    low = words[:, 0::2]
    if np.count_nonzero(low[:, 0] & VOID):
        raise LedgerError(f"launch {number}: the device ended a row that goes on")
    held = (low[:, 0] & HELD).nonzero()[0]
    if np.count_nonzero(low[held, 0] != HELD) or np.count_nonzero(low[:, 1:] & HELD):
        raise LedgerError(f"launch {number}: a row is held and has a token or an end")
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


def disagreement(
    found: SampledTokens, differs: NDArray[np.bool_], rows: Rows, slots: NDArray[np.intp], positions: NDArray[np.int32]
) -> str:
    """Return a description of each token at which only one side ended its row, for the error message. differs, slots,
    positions: [n], as `found`."""
    told = []
    for i in differs.nonzero()[0]:
        slot, stops = slots[i], rows.stop_ids[slots[i]]
        told.append(
            f"row slot {slot}, epoch {rows.epoch[slot]}, with token {found.token[i]} at position {positions[i]}, of at "
            f"most {rows.max_len[slot]} tokens and with stop ids {stops[stops >= 0].tolist()} from position "
            f"{rows.min_position[slot]} on: the device {'ended it' if found.stopped[i] else 'did not end it'}"
            + ", without its token"
            * bool(found.failed[i])
        )
    return "; ".join(told)


def _accepted(low: NDArray[np.int32], number: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int32]]:
    """Return rows, offsets and words of the cells, [rows, 1 + K], that have tokens."""
    there = (low & (VOID | HELD)) == 0
    if np.count_nonzero(there[:, 1:] & (~there[:, :-1] | ((low[:, :-1] & STOPPED) != 0))):
        raise LedgerError(f"launch {number}: a token follows a gap or the end of its row")
    row, offset = there.nonzero()
    return row, offset, low[row, offset]
