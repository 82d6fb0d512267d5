"""A model that a mistake cannot hide from: each token is a hash of every token before it, found by walking the row's
block table as the device's own state holds it when the work runs. A wrong table, a block reused too early or a stale
plan changes the tokens.

What else S looks at (seed, temperature, filters, bias, allowed tokens, penalties) has its say as
`tests.runtime.programs.hash_draw` says. Log-probabilities, of the prompt and of what is generated, are made up from the
same hash, before any of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import RingMemory, cell_tag
from runahead.runtime.drafters.ngram import Drafter
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.programs.cpu.inputs import Queries
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS
from tests.runtime.programs.hash_draw import draw, is_steered

_POISON = -(1 << 20)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


class HashProgram:
    """KV blocks [num_blocks, block_size] hold token ids; the logits for a token are one number.

    launched: the number that the first launch comes after. drafter: for launches with drafts. masks: of rows with a
    grammar.
    """

    def __init__(
        self,
        rings: RingMemory,
        *,
        max_rows: int,
        num_blocks: int,
        block_size: int,
        context_length: int,
        vocab_size: int,
        penalty_slots: int = 0,
        launched: int = 0,
        drafter: Drafter | None = None,
        masks: MaskMemory | None = None,
    ) -> None:
        max_blocks = -(-context_length // block_size)
        self.rows = HostRows(
            rings, max_rows, max_blocks, vocab_size, block_size, MAX_STOP_IDS, MAX_BIAS, penalty_slots=penalty_slots,
            launched=launched, drafter=drafter, masks=masks,
        )  # fmt: skip
        self.cache = np.full((num_blocks, block_size), _POISON, np.int64)
        self._hashes = np.zeros((max_rows + 1, 1 + rings.layout.drafts), np.uint64)

    def sample(self, shape: LaunchShape) -> None:
        self.rows.begin()
        if not shape.sample_rows:
            return
        rows, drafts = self.rows, shape.sample_drafts
        indexes, slots = rows.to_sample()
        masks: dict[int, list[NDArray[np.int32]]] = {}
        if rows.masks is not None and shape.form is Form.FULL:
            indexes, slots, masks = rows.judged(indexes, slots, drafts)
        if drafts:
            rows.begin_verified(indexes, slots, drafts)
        for offset in range(1 + drafts):
            tokens = self._sample_next(indexes, slots, shape.form, offset, masks)
            if offset < drafts:
                going = rows.goes_on(slots, tokens, offset)
                indexes, slots = indexes[going], slots[going]

    def _sample_next(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], form: Form, offset: int,
        masks: Mapping[int, Sequence[NDArray[np.int32]]],
    ) -> NDArray[np.int32]:  # fmt: skip
        """The next token of each row, number `offset` of its run. [n]"""
        rows, hashes = self.rows, self._hashes[slots, offset]
        tokens = ((hashes ^ rows.seed[slots].view(np.uint64)) % np.uint64(rows.vocab_size)).astype(np.int32)
        steered = is_steered(rows, slots, form)
        steered[[i for i, slot in enumerate(slots.tolist()) if slot in masks]] = True
        for i in np.flatnonzero(steered).tolist():
            slot = int(slots[i])
            mask = masks[slot][offset] if slot in masks else None
            tokens[i] = draw(rows, slot, int(hashes[i]), int(rows.seq_len[slot]), form, mask)
        nothing_left = tokens < 0 if masks else None
        if form is Form.FULL:
            self._leave_logprobs(indexes, slots, tokens, offset)
        finite = np.ones(slots.size, np.bool_)
        tokens = np.maximum(tokens, 0)
        rows.advance(indexes, slots, tokens, finite, offset, nothing_left)
        return tokens

    def apply(self, shape: LaunchShape) -> int:
        return self.rows.apply()

    def forward(self, shape: LaunchShape) -> None:
        if self.rows.rows.size == 0:
            return
        self.draft()
        queries = self.rows.queries()
        self.cache.reshape(-1)[queries.slot_mapping] = queries.token_ids
        self.written(queries)
        offsets = np.broadcast_to(queries.sample_offsets, queries.sample_slots.size)
        for slot, offset in zip(queries.sample_slots.tolist(), offsets.tolist(), strict=True):
            self._hashes[slot, offset] = self._hash(slot, offset)
        self.rows.write_finite(self.finite_tokens(queries), queries)
        if shape.prompt_logprobs:
            self._leave_prompt_logprobs(queries)

    def draft(self) -> None:
        """Draft tokens for the decode rows of F."""
        self.rows.draft()

    def written(self, queries: Queries) -> None:
        """The query tokens of F are in the cache, and nothing is made of them yet: more may be kept of them."""

    def finite_tokens(self, queries: Queries) -> NDArray[np.bool_]:
        """Which query tokens have finite hidden states, [T]: all of them, unless a test says otherwise."""
        return np.ones(queries.token_ids.size, np.bool_)

    def _hash(self, slot: int, drafts: int = 0) -> np.uint64:
        """Of all tokens that the row's block table finds in the cache, and of so many drafts behind them."""
        total = np.bitwise_xor.reduce(self._mixed(slot, drafts))
        return np.uint64(total ^ (total >> _HALF))

    def _mixed(self, slot: int, drafts: int = 0) -> NDArray[np.uint64]:
        """A number for each of the row's tokens and drafts, [seq_len + drafts], after its place and what the cache
        holds there."""
        length = int(self.rows.seq_len[slot]) + drafts if self.rows.alive[slot] else 0
        size = self.rows.block_size
        blocks = self.rows.block_table[slot, : -(-length // size)]
        tokens = self.cache[blocks].reshape(-1)[:length].astype(np.uint64)
        weights = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
        mixed = (tokens + np.uint64(1)) * (weights | np.uint64(1))
        mixed ^= mixed >> np.uint64(29)
        return mixed

    def _leave_logprobs(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], offset: int
    ) -> None:
        """Of the tokens [n] of rows that asked, number `offset` of their runs."""
        asking = np.flatnonzero(self.rows.logprobs[slots] >= 0)
        if asking.size:
            rings, cells = self.rows.rings, indexes[asking]
            slot, of = rings.slot(self.rows.number), slots[asking]
            found = self._made_up(self._hashes[of, offset], tokens[asking], self.rows.logprobs[of])
            here = slot, cells, offset
            rings.logprob[here], rings.top_ids[here], rings.top_logprobs[here] = found

    def _leave_prompt_logprobs(self, queries: Queries) -> None:
        """Made up of the hash of the tokens up to and with the query token, as the cache holds them, and the target."""
        wanted = self.rows.prompt_queries(queries)
        place = np.searchsorted(queries.query_start_loc, wanted.index, side="right") - 1
        for row in np.unique(place).tolist():
            here = place == row
            index = wanted.index[here]
            totals = np.bitwise_xor.accumulate(self._mixed(int(queries.slots[row])))[queries.positions[index]]
            found = self._made_up(totals ^ (totals >> _HALF), wanted.target[here], wanted.asked[here])
            self.rows.write_prompt_logprobs(wanted.entry[here], *found)

    def _made_up(
        self, hashes: NDArray[np.uint64], tokens: NDArray[np.integer], asked: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Log-probabilities of tokens [n] after what the hashes [n] are of, [n]; the most likely tokens and theirs, as
        many as each row asked for, [n, max_top]."""
        ranks = np.arange(self.rows.rings.layout.max_top, dtype=np.uint64)
        shown = ranks < asked.astype(np.uint64)[:, None]
        top_ids = (hashes[:, None] + ranks) % np.uint64(self.rows.vocab_size)
        top = -(hashes[:, None] % np.uint64(16) + ranks).astype(np.float32)
        chosen = (hashes ^ tokens.astype(np.uint64) * _GOLDEN) % np.uint64(4096)
        return (
            chosen.astype(np.float32) / np.float32(-256),
            np.where(shown, top_ids, np.uint64(0)).astype(np.int32),
            np.where(shown, top, np.float32(0)),
        )

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self.rows.read()

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Nonsense into KV blocks that nobody may read any more."""
        self.cache[list(blocks)] = _POISON

    def poison_row_slot(self, slot: int) -> None:
        """Nonsense into a row slot that nobody may name any more."""
        self.rows.last_token[slot] = _POISON
        self.rows.block_table[slot] = 1
        self.rows.alive[slot] = False
        self._hashes[slot] = 0xDEAD

    def poison_penalty_slot(self, slot: int) -> None:
        """Nonsense into a penalty slot that nobody may name any more."""
        self.rows.poison_penalty_slot(slot)

    def poison_state_slot(self, slot: int) -> None:
        raise AssertionError("no row of a model without states has a state slot")

    def poison_snapshots(self, snapshots: tuple[int, ...]) -> None:
        raise AssertionError("there are no snapshots of states that a model does not keep")


class NullProgram:
    """Publishes the same token for every row and computes nothing: what is left is the engine's own time.

    launched: the number that the first launch comes after.
    """

    def __init__(self, rings: RingMemory, *, max_rows: int, token: int, launched: int = 0) -> None:
        self._rings = rings
        self._token = token
        self._number = launched
        self._cells = np.full(max_rows, token, np.int64)
        rings.finite[:] = 1

    def sample(self, shape: LaunchShape) -> None:
        self._number += 1
        cells = self._rings.cells[self._rings.slot(self._number), : shape.sample_rows, 0]
        np.bitwise_or(self._cells[: shape.sample_rows], cell_tag(self._number), out=cells)

    def apply(self, shape: LaunchShape) -> int:
        return 0

    def forward(self, shape: LaunchShape) -> None:
        pass

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return {}
