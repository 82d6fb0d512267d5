"""Row state that the first rank decides and every rank copies: S's results, and drafts. And S in the plain form, whose
tokens all ranks choose together, each from its part of the logits.

The first rank samples, reads the masks of rows with a grammar, and drafts. The others copy its results, in absolute
values, so that their rows are the same. The rest of the row state follows from the plan, which every rank reads.
"""

from __future__ import annotations

from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.ranks import Ranks, RanksError, VocabRanks
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.kernels.reference.vocab_parts import sample_part
from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.programs.cpu.rows import HostRows

_SLOT, _TOKEN, _LENGTH, _VERDICT = range(4)  # 16 bytes a row
_ALIVE: Final = 1
_HELD: Final = 2


class VocabPart:
    """A rank's logits. whole, first, sampled: the first rank's array that `gather` writes, the id of the part's first
    logit, and how many of the part may be sampled.

    logits: float32 [max_rows + 1, 1 + K, vocab / ranks], by row slot.
    """

    def __init__(self, ranks: VocabRanks, whole: NDArray[np.float32], width: int, first: int, sampled: int) -> None:
        self.logits = np.zeros((*whole.shape[:2], width), np.float32)
        self._ranks, self._whole, self._first, self._sampled = ranks, whole, first, sampled

    def gather(self, slots: NDArray[np.int64], drafts: int) -> None:
        """Leave the logits of these rows, of their next token and of each draft, on the first rank. [n]"""
        own = self.logits[slots, : 1 + drafts]
        found = self._ranks.gather(torch.from_numpy(own.reshape(-1, own.shape[-1]))).numpy()
        self._whole[slots, : 1 + drafts] = found.reshape(*own.shape[:2], self._whole.shape[-1])

    def sample(self, slots: NDArray[np.int64], state: RowState) -> Sampled:
        """Sample the next token of these rows in the plain form, with the same result on every rank. [n]"""
        logits = self.logits[slots, 0, : self._sampled]
        return sample_part(logits, state, slots, self._first, self._ranks.collect)


def part_of(ranks: Ranks, whole: NDArray[np.float32], vocab: int, sampled_vocab: int | None) -> VocabPart | None:
    """Return this rank's part, or None if it has the whole model. whole: float32 [max_rows + 1, 1 + K, vocab], or
    [..., 0] on ranks other than the first. sampled_vocab: ids below this may be sampled; None: all."""
    own = ranks.share
    if own.is_whole:
        return None
    width, first = vocab // own.of, vocab // own.of * own.rank
    sampled = min(max((sampled_vocab or vocab) - first, 0), width)
    return VocabPart(cast(VocabRanks, ranks), whole, width, first, sampled)


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
