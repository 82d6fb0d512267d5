"""Collects what the next launch holds, and says what still fits into its plan and bulk slots."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.shape import LaunchShape
from runahead.runtime.plan import APPEND_WORDS, CHUNK_WORDS, HEADER_WORDS, Admission, Chunk, LaunchPlan
from runahead.runtime.scheduler.ledger import NO_EPOCHS, NO_SLOTS, Launch
from runahead.runtime.scheduler.outcomes import PromptPart
from runahead.runtime.scheduler.request import Request


class Planned(NamedTuple):
    """A plan, and what the host alone has to know of its launch.

    sample_slots, sample_epochs, samples, row_epochs, crossed_slots, crossed_epochs, prompt_parts, sample_guesses: see
    `Launch`. events: lifecycle events by kind since the plan before, those of making this one among them.
    """

    plan: LaunchPlan
    sample_slots: NDArray[np.int32]
    sample_epochs: NDArray[np.int64]
    samples: NDArray[np.bool_]
    row_epochs: NDArray[np.int64]
    events: Mapping[str, int]
    crossed_slots: NDArray[np.int32] = NO_SLOTS
    crossed_epochs: NDArray[np.int64] = NO_EPOCHS
    prompt_parts: tuple[PromptPart, ...] = ()
    sample_guesses: int = 0


def launch_of(planned: Planned, shape: LaunchShape, *, first: bool, overlapped: bool, calls: int = 1) -> Launch:
    """The ledger's record of a plan. shape: as the device is told, read from the staged plan. first, overlapped, calls:
    see `Launch`."""
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
        prompt_parts=planned.prompt_parts,
        guesses=plan.guesses,
        sample_guesses=planned.sample_guesses,
        prompt_tokens=sum(chunk.tokens.size for chunk in plan.chunks) if plan.chunks else 0,
        overlapped=overlapped,
        first=first,
        calls=calls,
    )


def prompt_parts(
    plan: LaunchPlan, asked: Sequence[tuple[Request, Chunk]], epochs: NDArray[np.int64]
) -> tuple[PromptPart, ...]:
    """asked: chunks of the plan whose requests want them. epochs: [max_rows] of rows by slot."""
    if not asked:
        return ()
    tokens = np.full(plan.rows.size, 1 + plan.drafts)
    for chunk in plan.chunks:
        tokens[np.searchsorted(plan.rows, chunk.slot)] = chunk.tokens.size
    begins = np.cumsum(tokens) - tokens
    return tuple(
        PromptPart(
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
    mixed_prefill_tokens: the same where rows decode in it; one chunk may be longer.
    prompts_owed: requests, and those of their chunks that leave log-probabilities of the prompt.
    """

    def __init__(
        self,
        number: int,
        plan_words: int,
        bulk_words: int,
        max_prefill_tokens: int,
        mixed_prefill_tokens: int = sys.maxsize,
    ) -> None:
        self.number = number
        self._drafts = self._guesses = 0
        self._plan_words = plan_words
        self._bulk_words = bulk_words
        self._prefill_left = self._longest_chunk = max_prefill_tokens
        self._mixed_prefill_tokens = mixed_prefill_tokens
        self._decode = NO_SLOTS
        self._appends: list[tuple[int, int, int]] = []
        self._chunks: list[Chunk] = []
        self._admissions: list[Admission] = []
        self._crossed: list[int] = []
        self.prompts_owed: list[tuple[Request, Chunk]] = []

    @property
    def rows(self) -> int:
        """Those that go on decoding, and those with a chunk."""
        return int(self._decode.size) + len(self._chunks)

    @property
    def has_rows(self) -> bool:
        return bool(self._decode.size or self._chunks)

    def appends_left(self, rows: int) -> int:
        """Block-table entries that still fit beside a list of `rows` rows."""
        return max(0, self._words_left(rows) // APPEND_WORDS)

    def fits(self, tokens: int, blocks: int, record_words: int) -> bool:
        """Room for a chunk of `tokens`, its `blocks` and, where there is one, the admission record of its row?"""
        words = 1 + CHUNK_WORDS + APPEND_WORDS * blocks + (1 if record_words else 0)
        return (
            tokens <= (self._prefill_left if self._chunks else self._longest_chunk)
            and tokens + 1 + record_words <= self._bulk_words  # one for the chunk's target
            and words <= self._words_left(self.rows)
        )

    def _words_left(self, rows: int) -> int:
        used = HEADER_WORDS + rows + APPEND_WORDS * len(self._appends)
        return self._plan_words - used - CHUNK_WORDS * len(self._chunks) - len(self._admissions)

    def decode(self, slots: NDArray[np.int32], drafts: int = 0, guesses: int = 0) -> None:
        """Rows that go on decoding. drafts: query tokens of one of them, in addition to its newest token, at most.
        guesses: of these, those that the drafter may make."""
        self._decode, self._drafts, self._guesses = slots, drafts, guesses
        if slots.size:
            self._prefill_left = min(self._prefill_left, self._mixed_prefill_tokens)

    def drop_drafts(self) -> NDArray[np.int32]:
        """Rows go on decoding without drafts: which ones. [n]"""
        self._drafts = 0
        return self._decode

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def append_blocks(self, slot: int, first_index: int, blocks: Sequence[int]) -> None:
        """block_table[slot, first_index + i] = blocks[i]."""
        count = len(blocks)
        self._append_each([slot] * count, range(first_index, first_index + count), blocks)

    def cross(self, slots: Sequence[int], places: Sequence[int], blocks: Sequence[int]) -> None:
        """These rows cross a border with this launch: block_table[slots[i], places[i]] = blocks[i]."""
        self._append_each(slots, places, blocks)
        self._crossed += slots

    def append_snapshots(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Each (slot, index, snapshot): block_table[slot, index] = snapshot, behind the row's blocks."""
        self._appends += entries

    def crossed(self) -> NDArray[np.int32]:
        """Slots of the rows that cross a border, one as often as it crosses. [n]"""
        return np.array(self._crossed, np.int32) if self._crossed else NO_SLOTS

    def _append_each(self, slots: Sequence[int], places: Sequence[int], blocks: Sequence[int]) -> None:
        self._appends += zip(slots, places, blocks, strict=True)

    def appends(self) -> NDArray[np.int32]:
        """[n, 3] (slot, index, block)"""
        return np.array(self._appends, np.int32) if self._appends else NO_APPENDS

    def chunk(self, chunk: Chunk) -> None:
        """Prompt tokens of one row."""
        self._chunks.append(chunk)
        self._prefill_left -= chunk.tokens.size
        self._bulk_words -= chunk.words

    def admit(self, admission: Admission) -> None:
        """A row's parameters, for a slot that begins with this launch."""
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
        """The plan. last_slots, last_samples: the row list that the device holds from the plan before. sample_rows,
        needs_full, sample_drafts, masked: see `LaunchPlan`."""
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
            rows=last_slots if continues else rows,  # the same array: whoever compares sees it at once
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
        """The device's row list is right as it is."""
        if rows.size != last_slots.size or np.count_nonzero(last_samples) < last_samples.size:
            return False
        return not np.count_nonzero(rows != last_slots)
