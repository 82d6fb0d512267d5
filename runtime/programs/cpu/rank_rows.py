"""Row state that the first rank decides and every rank copies: S's results, and drafts.

The first rank samples, reads the masks of rows with a grammar, and drafts. The others copy its results, in absolute
values, so that their rows are the same. The rest of the row state follows from the plan, which every rank reads.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.kernels.ranks import Ranks, RanksError
from runahead.runtime.programs.cpu.rows import HostRows

_SLOT, _TOKEN, _LENGTH, _VERDICT = range(4)  # 16 bytes a row
_ALIVE: Final = 1
_HELD: Final = 2


def take_over_sampled(state: HostRows, slots: NDArray[np.int64], ranks: Ranks) -> None:
    """Copy S's results of these rows, [n], from the first rank. Raises RanksError if a rank has another list of
    rows."""
    if ranks.share.is_whole:
        return
    words = np.zeros((slots.size, 4), np.int32)
    if ranks.share.is_first:
        words[:, _SLOT] = slots
        words[:, _TOKEN], words[:, _LENGTH] = state.last_token[slots], state.seq_len[slots]
        words[:, _VERDICT] = _ALIVE * state.alive[slots] + _HELD * state.held[slots]
    ranks.spread(words)
    if not np.array_equal(words[:, _SLOT], slots):
        raise RanksError(f"launch {state.number} samples other rows on rank {ranks.share.rank} than on rank 0")
    state.last_token[slots], state.seq_len[slots] = words[:, _TOKEN], words[:, _LENGTH]
    state.alive[slots], state.held[slots] = words[:, _VERDICT] & _ALIVE != 0, words[:, _VERDICT] & _HELD != 0


def draft(state: HostRows, ranks: Ranks) -> None:
    """Draft on the first rank before F, and copy its drafts to the others, if the launch has drafts."""
    if ranks.share.is_first:
        state.draft()
    if ranks.share.is_whole or not state.most_drafts:
        return
    slots, most = state.rows, state.most_drafts
    words = np.zeros((slots.size, 1 + most), np.int32)
    if ranks.share.is_first:
        words[:, 0], words[:, 1:] = state.drafted[slots], state.proposed[slots, :most]
    ranks.spread(words)
    state.drafted[slots], state.proposed[slots, :most] = words[:, 0], words[:, 1:]
