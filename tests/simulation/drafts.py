"""The hash model with made-up drafts: a launch brings 1 to 1 + K tokens of a row that decodes, each with its own K.

F of such a row has 1 + K query tokens: the newest token, then drafts, which it writes to the cache as it would tokens.
How many drafts are right is a function of the request's seed and the position, the others are garbage. The next S
verifies them one by one against what it would have sampled itself, trims the run where the row ends inside it, and
leaves the rest void. Garbage in the cache is written over by the next F before anything reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import NON_FINITE, STOPPED, TOKEN_MASK, VOID, RingMemory, cell_tag
from runahead.runtime import plan as layout
from runahead.runtime.drafters.ngram import NO_DRAFT, Drafter
from runahead.runtime.programs.cpu.inputs import Queries, clamped
from runahead.runtime.programs.cpu.rows import HostRows
from tests.runtime.programs.hash_draw import draw
from tests.runtime.programs.hash_model import VOCAB
from tests.simulation.programs import Sickness, SimulatedProgram, SimulatedRows
from tests.simulation.script import DRAFTS

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NO_DRAFT = -1
_CHUNK = -1  # in the place of how many drafts are right: F had a chunk of the row
_PER_ROW = 1 + DRAFTS
_STRETCH = 6  # launches with the same K


def tokens_brought(seed: int, position: int) -> int:
    """1 to 1 + DRAFTS: how long the run is that begins with the token at this position, if nothing trims it."""
    return 1 + (((seed ^ position * _GOLDEN) & _MASK) >> 17) % _PER_ROW


class ChangingChoice:
    """A K for every few launches, by their number: often none for a while."""

    most = DRAFTS

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def drafts(self, number: int, rows: int) -> int:
        stretch = number // _STRETCH
        return (0, 1, 0, DRAFTS)[(((self._seed ^ stretch * _GOLDEN) & _MASK) >> 23) % 4]

    def stays_until(self, number: int) -> int:
        return number // _STRETCH * _STRETCH + _STRETCH - 1

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        assert (drafted <= DRAFTS).all() and (accepted <= drafted).all() and (accepted >= 0).all()


class ToldDrafter(Drafter):
    """A drafter that knows what requests will be answered: as many of its drafts are right as `tokens_brought` says.

    tokens: of each request, prompt and answer, by its seed. rows: set once there are some.
    """

    rows: HostRows

    def __init__(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._tokens = tokens

    def read(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        pass

    def took(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        pass

    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        found = np.full((slots.size, count), NO_DRAFT, np.int32)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            seed = int(self.rows.seed[slot])
            coming = self._tokens[seed][length : length + count]
            right = tokens_brought(seed, length) - 1
            found[row, : len(coming)] = [(token + (at >= right)) % VOCAB for at, token in enumerate(coming)]
        return found

    def memory(self) -> Mapping[str, NDArray[np.generic]]:
        return {}

    def poison(self, slot: int) -> None:
        pass


class DraftRows(SimulatedRows):
    """Row state of rows whose F has 1 + drafts query tokens, but for those that prefill."""

    drafts = 0  # of the launch whose F runs

    def queries(self) -> Queries:
        """`token_ids` of drafts are not known yet: F makes them up, and writes them itself."""
        slots, alive = self.rows, self.alive[self.rows]
        counts = np.full(slots.size, 1 + self.drafts, np.int64)
        counts[self.chunks[:, layout.CHUNK_ROW]] = self.chunks[:, layout.CHUNK_TOKENS]
        starts = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(slots.size), counts)
        first = np.maximum(self.seq_len[slots].astype(np.int64) - 1, 0)  # position of the newest token
        first[self.chunks[:, layout.CHUNK_ROW]] = self.chunks[:, layout.CHUNK_START]
        positions = first[row] + np.arange(int(starts[-1])) - starts[row]
        tokens = self.last_token[slots][row].astype(np.int32)
        bulk = self.rings.bulk[self.rings.slot(self.number)]
        for place, _, count, offset, _ in self.chunks.tolist():
            tokens[starts[place] : starts[place] + count] = bulk[offset : offset + count]
        # The token at max_position is never forwarded: there is no block for it, nor for what lies beyond.
        written = alive[row] & (positions < self.max_position[slots][row])
        index = np.minimum(positions // self.block_size, self.block_table.shape[1] - 1)
        blocks = np.where(written, self.block_table[slots[row], index], 0).astype(np.int64)
        sampled = np.flatnonzero(self.samples)
        queries = Queries(
            token_ids=clamped(self, tokens),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start_loc=starts.astype(np.int32),
            seq_lens=np.where(alive, self.seq_len[slots], 0).astype(np.int32),
            slots=slots,
            sample_queries=starts[sampled + 1] - 1,
            sample_slots=slots[sampled],
        )
        self.check_blocks(queries, written)
        return queries

    def keep(self, slot: int, token: int, is_finite: bool) -> int:
        """One more token of a live row, as `HostRows.advance` does it. Returns the low half of its cell."""
        self.sampled(slot)
        position = int(self.seq_len[slot])
        stops = token in self.stop_ids[slot] and position >= self.min_position[slot]
        self.last_token[slot] = token
        self.seq_len[slot] += is_finite
        self.alive[slot] = is_finite and not stops and position < self.max_position[slot]
        if is_finite and self.penalty_slot[slot] >= 0:
            self.counts[self.penalty_slot[slot], token] += 1
        return token | (0 if self.alive[slot] else STOPPED) | (0 if is_finite else NON_FINITE)


class DraftProgram(SimulatedProgram):
    """What F leaves of a row: a hash for each token of its run, and the drafts that the next S verifies."""

    rows: DraftRows
    make_rows = DraftRows

    def __init__(self, rings: RingMemory, *, sickness: Mapping[int, Sickness], **sizes: Any) -> None:
        super().__init__(rings, sickness=sickness, **sizes)
        slots = sizes["max_rows"] + 1
        self._run = np.zeros((slots, _PER_ROW), np.uint64)
        self._drafts = np.full((slots, DRAFTS), _NO_DRAFT, np.int64)
        self._right = np.zeros(slots, np.int64)  # how many of the drafts are
        self._sick_run = np.zeros((slots, _PER_ROW), np.bool_)  # logits of the run that are not finite
        self.runs: Counter[int] = Counter()  # by their length
        self.trimmed = 0  # runs that a row ended in, with right drafts left

    # ------------------------------------------------------------ S

    def sample(self, shape: LaunchShape) -> None:
        number = self.rows.begin()
        if not shape.sample_rows:
            return
        places, slots = self.rows.to_sample()
        ring_slot, drafts = self.rows.rings.slot(number), shape.sample_drafts
        cells = self.rows.rings.cells[ring_slot]
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            cells[place, : 1 + drafts] = cell_tag(number) | VOID
            self.rows.rings.drafted[ring_slot, place] = np.count_nonzero(self._drafts[slot] != _NO_DRAFT)
            kept = self._verify(slot, shape.form, drafts)
            for offset, low in enumerate(kept):
                cells[place, offset] = cell_tag(number) | low
            if shape.form is Form.FULL and self.rows.logprobs[slot] >= 0:
                self._describe(place, slot, kept)

    def _verify(self, slot: int, form: Form, drafts: int) -> list[int]:
        """The run of a row: its tokens until one was not the draft after it, or ends the row."""
        kept: list[int] = []
        while self.rows.alive[slot]:
            position = int(self.rows.seq_len[slot])
            token = draw(self.rows, slot, int(self._run[slot, len(kept)]), position, form)
            is_finite = not self._sick_run[slot, len(kept)] and self.rows.has_finite_logits(slot, position)
            kept.append(self.rows.keep(slot, token, is_finite))
            if len(kept) > drafts or self._drafts[slot, len(kept) - 1] != token:
                break
        if kept:
            self.runs[len(kept)] += 1
            self.trimmed += not self.rows.alive[slot] and len(kept) <= self._right[slot]
        return kept

    def _describe(self, place: int, slot: int, kept: list[int]) -> None:
        """Log-probabilities of a row's run, whose cells have these low halves, each to the place of its token."""
        rings, count = self.rows.rings, len(kept)
        tokens, asked = np.array(kept, np.int64) & TOKEN_MASK, np.full(count, self.rows.logprobs[slot])
        ring = rings.slot(self.rows.number)
        here = ring, place, slice(count)
        found = self._made_up(self._run[slot, :count], tokens, asked)
        rings.logprob[here], rings.top_ids[here], rings.top_logprobs[here] = found

    # ------------------------------------------------------------ F

    def forward(self, shape: LaunchShape) -> None:
        if self.rows.rows.size == 0:
            return
        self.rows.drafts = shape.drafts
        queries = self.rows.queries()
        chunks = set(self.rows.chunks[:, layout.CHUNK_ROW].tolist())
        for row, slot in enumerate(queries.slots.tolist()):
            begin, end = queries.query_start_loc[row : row + 2].tolist()
            if row in chunks:
                self.cache.reshape(-1)[queries.slot_mapping[begin:end]] = queries.token_ids[begin:end]
                self._run[slot, 0] = self._hash(slot)
                self._drafts[slot] = _NO_DRAFT
                self._right[slot] = _CHUNK
            elif queries.seq_lens[row]:
                self._draft(slot, queries.slot_mapping[begin:end], int(queries.token_ids[begin]))
        self.rows.write_finite(self.finite_tokens(queries), queries)
        if shape.prompt_logprobs:
            self._leave_prompt_logprobs(queries)

    def _draft(self, slot: int, mapping: NDArray[np.int64], newest: int) -> None:
        """Write the newest token and the drafts after it, each made up from what the cache holds before it."""
        cache, rows = self.cache.reshape(-1), self.rows
        cache[mapping[0]] = newest
        position = int(rows.seq_len[slot])  # of the token that follows
        right = self._right[slot] = min(tokens_brought(int(rows.seed[slot]), position) - 1, rows.drafts)
        total = int(np.bitwise_xor.reduce(self._mixed(slot)))
        counted: list[int] = []
        self._drafts[slot] = _NO_DRAFT
        for offset in range(1 + rows.drafts):
            self._run[slot, offset] = total ^ (total >> 32)
            if offset == rows.drafts or position + offset >= rows.max_position[slot]:
                break
            token = draw(rows, slot, int(self._run[slot, offset]), position + offset, Form.FULL)
            if rows.penalty_slot[slot] >= 0:
                rows.counts[rows.penalty_slot[slot], token] += 1
                counted.append(token)
            draft = token if offset < right else (token + 1) % rows.vocab_size
            self._drafts[slot, offset] = draft
            cache[mapping[1 + offset]] = draft
            mixed = (int(cache[mapping[1 + offset]]) + 1) * (((position + offset + 1) * _GOLDEN & _MASK) | 1) & _MASK
            total ^= mixed ^ (mixed >> 29)
        for token in counted:
            rows.counts[rows.penalty_slot[slot], token] -= 1

    def _mark_sick(self, slot: int, mapping: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """A draft is as sick as the token that it stands for; one that is wrong stands for none."""
        end = min(int(self.rows.seq_len[slot] + max(self._right[slot], 0)), int(self.rows.max_position[slot]))
        super()._mark_sick(slot, mapping[positions < end], positions[positions < end])

    def _leave_sickness(self, slot: int, finite: NDArray[np.bool_]) -> None:
        if self._right[slot] == _CHUNK:
            self._sick_run[slot] = not finite[-1]
        else:
            self._sick_run[slot, : finite.size] = ~finite

    def poison_row_slot(self, slot: int) -> None:
        super().poison_row_slot(slot)
        self._run[slot] = 0xDEAD
