"""Collects the next launch's rows, and tells what still fits into its plan and bulk slots."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import LaunchShape
from runahead.runtime.plan import APPEND_WORDS, CHUNK_WORDS, HEADER_WORDS, Admission, Chunk, LaunchPlan
from runahead.runtime.scheduler.ledger import NO_EPOCHS, NO_SLOTS, Launch
from runahead.runtime.scheduler.outcomes import PromptLogprobRange
from runahead.runtime.scheduler.request import Request


class Planned(NamedTuple):
    """A plan and the host's records of its launch.

    sample_slots, sample_epochs, samples, row_epochs, crossed_slots, crossed_epochs, prompt_logprob_ranges,
    sample_guesses: see `Launch`. events: lifecycle events by kind since the plan before, including this plan's.
    """

    plan: LaunchPlan
    sample_slots: NDArray[np.int32]
    sample_epochs: NDArray[np.int64]
    samples: NDArray[np.bool_]
    row_epochs: NDArray[np.int64]
    events: Mapping[str, int]
    crossed_slots: NDArray[np.int32] = NO_SLOTS
    crossed_epochs: NDArray[np.int64] = NO_EPOCHS
    prompt_logprob_ranges: tuple[PromptLogprobRange, ...] = ()
    sample_guesses: int = 0


def launch_of(planned: Planned, shape: LaunchShape, *, first: bool, overlapped: bool, calls: int = 1) -> Launch:
    """Return the ledger's record of a plan. shape: read from the staged plan, as on the device. first, overlapped,
    calls: see `Launch`."""
    plan = planned.plan
    return Launch(
        shape=shape,
        sample_slots=planned.sample_slots,
        sample_epochs=planned.sample_epochs,
        samples=planned.samples,
        row_slots=plan.rows,
        row_epochs=planned.row_epochs,
        row_samples=plan.samples,
        crossed_slots=planned.crossed_slots,
        crossed_epochs=planned.crossed_epochs,
        prompt_logprob_ranges=planned.prompt_logprob_ranges,
        guesses=plan.guesses,
        sample_guesses=planned.sample_guesses,
        prompt_tokens=sum(chunk.tokens.size for chunk in plan.chunks) if plan.chunks else 0,
        overlapped=overlapped,
        first=first,
        calls=calls,
    )


def prompt_logprob_ranges(
    plan: LaunchPlan, asked: Sequence[tuple[Request, Chunk]], epochs: NDArray[np.int64]
) -> tuple[PromptLogprobRange, ...]:
    """Return the prompt log-probabilities that a plan's launch leaves. asked: chunks whose requests want them. epochs:
    [max_rows] of rows by slot."""
    if not asked:
        return ()
    tokens = np.full(plan.rows.size, 1 + plan.drafts)
    for chunk in plan.chunks:
        tokens[np.searchsorted(plan.rows, chunk.slot)] = chunk.tokens.size
    begins = np.cumsum(tokens) - tokens
    return tuple(
        PromptLogprobRange(
            request,
            int(epochs[chunk.slot]),
            chunk.slot,
            chunk.start,
            int(begins[np.searchsorted(plan.rows, chunk.slot)]),
            chunk.tokens.size - chunk.samples,
        )
        for request, chunk in asked
    )


NO_APPENDS = np.zeros((0, APPEND_WORDS), np.int32)


class PlanBuilder:
    """One launch's plan in the making.

    plan_words, bulk_words: int32 words of the two slots. max_prefill_tokens: prompt tokens a launch may carry.
    mixed_prefill_tokens: the same where rows decode in it; one chunk may be longer. piece_tokens: a chunk that does not
    fit is cut at a multiple of so many tokens; 0: chunks stay whole.
    prompts_owed: requests, and their chunks that leave log-probabilities of the prompt.
    """

    def __init__(
        self,
        number: int,
        plan_words: int,
        bulk_words: int,
        max_prefill_tokens: int,
        mixed_prefill_tokens: int = sys.maxsize,
        piece_tokens: int = 0,
    ) -> None:
        self.number = number
        self._drafts = self._guesses = 0
        self._plan_words = plan_words
        self._bulk_words = bulk_words
        self._prefill_left = self._longest_chunk = max_prefill_tokens
        self._mixed_prefill_tokens = mixed_prefill_tokens
        self._piece_tokens = piece_tokens
        self._decode = NO_SLOTS
        self._appends: list[tuple[int, int, int]] = []
        self._chunks: list[Chunk] = []
        self._admissions: list[Admission] = []
        self._crossed: list[int] = []
        self.prompts_owed: list[tuple[Request, Chunk]] = []

    @property
    def rows(self) -> int:
        """Number of decode rows and rows with a chunk."""
        return int(self._decode.size) + len(self._chunks)

    @property
    def has_rows(self) -> bool:
        return bool(self._decode.size or self._chunks)

    def appends_left(self, rows: int) -> int:
        """Return how many block-table entries still fit beside a list of `rows` rows."""
        return max(0, self._words_left(rows) // APPEND_WORDS)

    def fits(self, tokens: int, blocks: int, record_words: int) -> bool:
        """Return whether a chunk of `tokens`, its `blocks` and the row's admission record, if any, fit."""
        words = 1 + CHUNK_WORDS + APPEND_WORDS * blocks + (1 if record_words else 0)
        return (
            tokens <= (self._prefill_left if self._chunks else self._longest_chunk)
            and tokens + 1 + record_words <= self._bulk_words  # one word for the chunk's target
            and words <= self._words_left(self.rows)
        )

    def piece(self, start: int, end: int) -> int:
        """Return where the piece ends that this launch takes of a chunk. Both the piece and the rest of the chunk have
        at least piece_tokens tokens: a single token would have the bits of a decode step. A chunk that can't be cut so
        stays whole."""
        unit, left = self._piece_tokens, self._prefill_left
        if not unit or end - start <= left:
            return end
        cut = min(start + left, end - unit) // unit * unit
        return cut if cut - start >= unit else end

    def _words_left(self, rows: int) -> int:
        used = HEADER_WORDS + rows + APPEND_WORDS * len(self._appends)
        return self._plan_words - used - CHUNK_WORDS * len(self._chunks) - len(self._admissions)

    def decode(self, slots: NDArray[np.int32], drafts: int = 0, guesses: int = 0) -> None:
        """Set the decode rows. drafts: query tokens of a row in addition to its newest token, at most. guesses: of
        these, guesses of the drafter."""
        self._decode, self._drafts, self._guesses = slots, drafts, guesses
        if slots.size:
            self._prefill_left = min(self._prefill_left, self._mixed_prefill_tokens)

    def drop_drafts(self) -> NDArray[np.int32]:
        """Remove the drafts of the decode rows, and return these rows. [n]"""
        self._drafts = 0
        return self._decode

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def append_blocks(self, slot: int, first_index: int, blocks: Sequence[int]) -> None:
        """Set block_table[slot, first_index + i] = blocks[i]."""
        count = len(blocks)
        self._append_each([slot] * count, range(first_index, first_index + count), blocks)

    def cross(self, slots: Sequence[int], indexes: Sequence[int], blocks: Sequence[int]) -> None:
        """Set block_table[slots[i], indexes[i]] = blocks[i] for rows that cross a block boundary with this launch."""
        self._append_each(slots, indexes, blocks)
        self._crossed += slots

    def append_snapshots(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Set block_table[slot, index] = snapshot for each (slot, index, snapshot), behind the row's blocks."""
        self._appends += entries

    def crossed(self) -> NDArray[np.int32]:
        """Return the slots of the rows that cross a block boundary, once for each crossing. [n]"""
        return np.array(self._crossed, np.int32) if self._crossed else NO_SLOTS

    def _append_each(self, slots: Sequence[int], indexes: Sequence[int], blocks: Sequence[int]) -> None:
        self._appends += zip(slots, indexes, blocks, strict=True)

    def appends(self) -> NDArray[np.int32]:
        """Return the block-table entries: [n, 3] (slot, index, block)."""
        return np.array(self._appends, np.int32) if self._appends else NO_APPENDS

    def chunk(self, chunk: Chunk) -> None:
        """Add the prompt tokens of one row."""
        self._chunks.append(chunk)
        self._prefill_left -= chunk.tokens.size
        self._bulk_words -= chunk.words

    def admit(self, admission: Admission) -> None:
        """Add the admission record of a slot that begins with this launch."""
        self._admissions.append(admission)
        self._bulk_words -= admission.size

    def build(
        self,
        last_slots: NDArray[np.int32],
        last_samples: NDArray[np.bool_],
        sample_rows: int = 0,
        needs_full: bool = False,
        sample_drafts: int = 0,
        masked: bool = False,
    ) -> LaunchPlan:
        """Return the plan. last_slots, last_samples: the row list that the device has from the previous plan.
        sample_rows, needs_full, sample_drafts, masked: see `LaunchPlan`."""
        rows = self._decode
        if self._chunks:
            rows = np.concatenate([rows, np.array([chunk.slot for chunk in self._chunks], np.int32)])
            rows.sort()
        samples = np.empty(rows.size, np.bool_)
        samples.fill(True)
        for chunk in self._chunks:
            if not chunk.samples:
                samples[rows.searchsorted(chunk.slot)] = False
        drafts = self._drafts if self._decode.size else 0
        continues = self._continues(rows, last_slots, last_samples)
        return LaunchPlan(
            number=self.number,
            rows=last_slots if continues else rows,  # the same array, so that comparing is quick
            samples=samples,
            row_list_changed=not continues,
            appends=self.appends(),
            chunks=tuple(self._chunks),
            admissions=tuple(self._admissions),
            tokens=self._decode.size * (1 + drafts) + sum(chunk.tokens.size for chunk in self._chunks),
            sample_rows=sample_rows,
            needs_full=needs_full,
            is_decode=self.has_rows and all(chunk.tokens.size == 1 + drafts for chunk in self._chunks),
            prompt_logprobs=bool(self.prompts_owed),
            drafts=drafts,
            sample_drafts=sample_drafts,
            guesses=min(self._guesses, drafts),
            masked=masked,
        )

    @staticmethod
    def _continues(rows: NDArray[np.int32], last_slots: NDArray[np.int32], last_samples: NDArray[np.bool_]) -> bool:
        """Return whether the device's row list is already right."""
        if rows.size != last_slots.size or np.count_nonzero(last_samples) < last_samples.size:
            return False
        return not np.count_nonzero(rows != last_slots)
