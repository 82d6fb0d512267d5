"""S on the CPU: the next token of each row, or the accepted drafts and the next token.

Among ranks the first one samples, reads the masks of rows with a grammar, and drafts. The others copy its results, in
absolute values, so that their rows are the same. The rest of the row state follows from the plan, which every rank
reads. In the plain form all ranks choose the tokens together, each from its part of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks, RanksError, VocabRanks
from runahead.runtime.kernels.reference.sampling import NO_MASKS, Sampled, are_drawn, log_probabilities, sample_rows
from runahead.runtime.kernels.reference.vocab_parts import sample_part
from runahead.runtime.kernels.row_state import PenaltyState, RowState
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.programs.cpu.inputs import Queries
from runahead.runtime.programs.cpu.rows import HostRows

_SLOT, _TOKEN, _LENGTH, _VERDICT = range(4)  # 16 bytes a row
_ALIVE: Final = 1
_HELD: Final = 2

_TILE: Final = 32  # query tokens of one logits computation


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
    own = ranks.shard
    if own.is_whole:
        return None
    width, first = vocab // own.of, vocab // own.of * own.rank
    sampled = min(max((sampled_vocab or vocab) - first, 0), width)
    return VocabPart(cast(VocabRanks, ranks), whole, width, first, sampled)


def take_over_sampled(state: HostRows, slots: NDArray[np.int64], ranks: Ranks) -> None:
    """Copy S's results of these rows, [n], from the first rank. Raises RanksError if a rank has another list of
    rows."""
    if ranks.shard.is_whole:
        return
    words = np.zeros((slots.size, 4), np.int32)
    if ranks.shard.is_first:
        words[:, _SLOT] = slots
        words[:, _TOKEN], words[:, _LENGTH] = state.last_token[slots], state.seq_len[slots]
        words[:, _VERDICT] = _ALIVE * state.alive[slots] + _HELD * state.held[slots]
    ranks.spread(words)
    if not np.array_equal(words[:, _SLOT], slots):
        raise RanksError(f"launch {state.number} samples other rows on rank {ranks.shard.rank} than on rank 0")
    state.last_token[slots], state.seq_len[slots] = words[:, _TOKEN], words[:, _LENGTH]
    state.alive[slots], state.held[slots] = words[:, _VERDICT] & _ALIVE != 0, words[:, _VERDICT] & _HELD != 0


def draft(state: HostRows, ranks: Ranks) -> None:
    """Draft on the first rank before F, and copy its drafts to the others, if the launch has drafts."""
    if ranks.shard.is_first:
        state.draft()
    if ranks.shard.is_whole or not state.most_drafts:
        return
    slots, most = state.rows, state.most_drafts
    words = np.zeros((slots.size, 1 + most), np.int32)
    if ranks.shard.is_first:
        words[:, 0], words[:, 1:] = state.drafted[slots], state.proposed[slots, :most]
    ranks.spread(words)
    state.drafted[slots], state.proposed[slots, :most] = words[:, 0], words[:, 1:]


def leave_prompt_logprobs(
    model: Decoder, rows: HostRows, hidden: torch.Tensor, queries: Queries, finite: NDArray[np.bool_], vocab: int
) -> None:
    """Write the prompt log-probabilities of this launch's query tokens into its result slot. hidden: [T, hidden].

    finite: [T], set to False for a query token whose logits are not finite: it leaves zeros, and its row has failed.
    vocab: ids below this may be sampled; other prompt tokens have a log-probability of -inf.
    """
    wanted = rows.prompt_queries(queries)
    for first in range(0, wanted.index.size, _TILE):
        tile = slice(first, first + _TILE)
        index = wanted.index[tile]
        logits = model.logits(hidden[torch.from_numpy(index)]).numpy()[:, :vocab]
        if not model.ranks.shard.is_first:
            continue  # the first rank has all logits
        good = np.isfinite(logits).all(axis=1)
        finite[index[~good]] = False
        asked = np.where(good, wanted.asked[tile], np.int32(-1))
        target = wanted.target[tile]
        found = log_probabilities(logits, np.minimum(target, vocab - 1), asked, rows.rings.layout.max_top)
        found.chosen[(target >= vocab) & good] = -np.inf
        rows.write_prompt_logprobs(wanted.entry[tile], found.chosen, found.top_ids, found.top)


_DRAWN_AT_ONCE: Final = 16  # drafts of random rows that are sampled before it is known which are kept


class HostSampler:
    """Samples from the logits that F has left.

    logits: float32 [max_rows + 1, 1 + K, vocab], by row slot, of the tokens that may be sampled. state, penalties: the
    memory of `rows`. vocab: the number of these tokens. ranks: only the first has these logits. part: each rank's own.
    """

    def __init__(
        self,
        rows: HostRows,
        logits: NDArray[np.float32],
        state: RowState,
        penalties: PenaltyState,
        ranks: Ranks = ONE_RANK,
        part: VocabPart | None = None,
    ) -> None:
        self._rows = rows
        self._part = part
        self._ranks = ranks
        self._logits = logits
        self.vocab = logits.shape[-1]
        self._state = state
        self._penalties = penalties

    def sample(self, indexes: NDArray[np.intp], slots: NDArray[np.int64], form: Form, drafts: int) -> None:
        """Advance these rows and write their cells. indexes: in the row list. drafts: most drafts of a row in the
        previous F. [n], [n]"""
        is_first = self._ranks.shard.is_first
        if self._part is not None and form is Form.PLAIN and not drafts:
            sampled = self._part.sample(slots, self._state)
            if is_first:
                self._rows.advance(indexes, slots, sampled.tokens.numpy().astype(np.int32), sampled.finite.numpy())
        else:
            if self._part is not None:
                self._part.gather(slots, drafts)
            if is_first:
                self._sample(indexes, slots, form, drafts)
        take_over_sampled(self._rows, slots, self._ranks)

    def draft(self) -> None:
        """Draft tokens for the decode rows of F on every rank: see `HostRows.draft`."""
        draft(self._rows, self._ranks)

    def _sample(self, indexes: NDArray[np.intp], slots: NDArray[np.int64], form: Form, drafts: int) -> None:
        masks: Mapping[int, Sequence[NDArray[np.int32]]] = {}
        if self._rows.masks is not None and form is Form.FULL:
            indexes, slots, masks = self._rows.judged(indexes, slots, drafts)
        if not drafts:
            self._sample_next(indexes, slots, form, 0, masks)
            return
        self._rows.begin_verified(indexes, slots, drafts)
        if not np.count_nonzero(self._rows.drafted[slots]):
            self._sample_next(indexes, slots, form, 0, masks)
        elif form is Form.PLAIN and self._is_cheap_at_once(slots):
            self._sample_at_once(indexes, slots, drafts)
        else:
            self._sample_stepwise(indexes, slots, form, drafts, masks)

    def guessed(self, logits: torch.Tensor, slots: NDArray[np.int64], ahead: int) -> NDArray[np.int32]:
        """Return the tokens of these rows, `ahead` positions beyond their length, that the plain form will sample from
        such logits with that position's noise. float32 [n, vocab], [n], returns [n]"""
        logits = logits[:, : self.vocab]
        if not are_drawn(self._state, slots).any():
            likeliest: NDArray[np.int32] = logits.numpy().argmax(axis=1).astype(np.int32)
            return likeliest
        by_row, each_ahead = torch.from_numpy(slots), torch.full((slots.size,), ahead)
        drawn = sample_rows(logits, self._state, self._penalties, by_row, Form.PLAIN, 0, ahead=each_ahead)
        return drawn.tokens.numpy().astype(np.int32)

    def _sample_next(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], form: Form, offset: int,
        masks: Mapping[int, Sequence[NDArray[np.int32]]],
    ) -> NDArray[np.int32]:  # fmt: skip
        """Sample token number `offset` of each row. [n] masks: of rows with a grammar, by row slot, for each verified
        token."""
        max_top = self._rows.rings.layout.max_top
        logits = torch.from_numpy(self._logits[slots, offset])
        now = _masks_at(masks, slots, offset) if masks else NO_MASKS
        sampled = sample_rows(logits, self._state, self._penalties, torch.from_numpy(slots), form, max_top, masks=now)
        if sampled.logprob is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            slot = self._rows.rings.slot(self._rows.number)
            self._rows.rings.logprob[slot, indexes, offset] = sampled.logprob.numpy()
            self._rows.rings.top_ids[slot, indexes, offset] = sampled.top_ids.numpy()
            self._rows.rings.top_logprobs[slot, indexes, offset] = sampled.top_logprobs.numpy()
        tokens = sampled.tokens.numpy().astype(np.int32)
        nothing_left = None if sampled.nothing_left is None else sampled.nothing_left.numpy()
        self._rows.advance(indexes, slots, tokens, sampled.finite.numpy(), offset, nothing_left)
        return tokens

    def _sample_stepwise(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], form: Form, drafts: int,
        masks: Mapping[int, Sequence[NDArray[np.int32]]],
    ) -> None:  # fmt: skip
        """Sample position after position: each token from the row state after the previous one, and under the mask
        behind the accepted drafts."""
        for offset in range(drafts):
            tokens = self._sample_next(indexes, slots, form, offset, masks)
            going = self._rows.goes_on(slots, tokens, offset)
            indexes, slots = indexes[going], slots[going]
            if not slots.size:
                return
        self._sample_next(indexes, slots, form, drafts, masks)

    def _sample_at_once(self, indexes: NDArray[np.intp], slots: NDArray[np.int64], drafts: int) -> None:
        """Sample all positions at once in the plain form, where a token depends on its position alone. Tokens behind a
        wrong draft are dropped."""
        counts = 1 + self._rows.drafted[slots]
        row = np.repeat(np.arange(slots.size), counts)
        offset = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        logits = torch.from_numpy(self._logits[slots[row], offset])
        ahead = torch.from_numpy(offset)
        sampled = sample_rows(
            logits, self._state, self._penalties, torch.from_numpy(slots[row]), Form.PLAIN, 0, ahead=ahead
        )
        tokens, finite = np.zeros((slots.size, 1 + drafts), np.int32), np.ones((slots.size, 1 + drafts), np.bool_)
        tokens[row, offset], finite[row, offset] = sampled.tokens.numpy(), sampled.finite.numpy()
        self._rows.advance_verified(indexes, slots, tokens, finite)

    def _is_cheap_at_once(self, slots: NDArray[np.int64]) -> bool:
        """Return whether few enough tokens are drawn at random: one costs a hundred times a greedy token."""
        drawn = self._rows.drafted[slots][are_drawn(self._state, slots)]
        return int(drawn.sum()) <= _DRAWN_AT_ONCE


def _masks_at(
    masks: Mapping[int, Sequence[NDArray[np.int32]]], slots: NDArray[np.int64], offset: int
) -> dict[int, NDArray[np.int32]]:
    """Return the masks of token number `offset` of these rows, [n], by the rows' indexes."""
    return {i: masks[slot][offset] for i, slot in enumerate(slots.tolist()) if slot in masks}
