"""Bounds on plans."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FORCED_ROWS: Final = 8  # most decoding rows of a launch with forced drafts


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on every plan. Words are int32 words of the rings' slots.

    penalty_slots: rows that may have penalties at a time. prefix_cache: full blocks can be found by their content.
    drafts: a launch brings at most 1 + drafts tokens of a row; of a row with a grammar 1 + forced_drafts, if that is
    more, in launches with at most forced_rows decoding rows. In a launch of many rows a query token costs nearly what
    it brings, and all rows pay for it. draft_rows: above 0, launches with drafts are separate forms of at most so many
    rows, all decoding and with equally many query tokens; 0: any launch may have drafts, and a row without drafts costs
    one query token. history: the device gets the tokens of cached prefixes, because its drafter reads them.
    guesses_along_masks: the drafter also guesses for rows with a grammar. has_state: a row has a state slot beside its
    blocks, and a prefix is found only up to a snapshot. snapshots: number of snapshots. snapshot_tokens: tokens between
    two boundaries with a snapshot; 0: only the states behind shared prompts are kept. state_unit: chunks that end at
    multiples of so many tokens leave the same state as a single chunk. admissions: rows that may begin with one launch,
    since making their records takes the loop's time. patience_s: how long a caller lacks a row before a row of another
    caller leaves. mixed_prefill_tokens: prompt tokens of a launch with decoding rows, at most, unless they are one
    chunk. mixed_graph_tokens, piece_tokens: see `mixed_tokens`.
    """

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefill_chunk: int
    max_prefill_tokens: int
    plan_words: int
    bulk_words: int
    penalty_slots: int = 0
    prefix_cache: bool = True
    drafts: int = 0
    draft_rows: int = 0
    forced_drafts: int = 0
    forced_rows: int = FORCED_ROWS
    history: bool = False
    guesses_along_masks: bool = True
    has_state: bool = False
    snapshots: int = 0
    snapshot_tokens: int = 0
    state_unit: int = 1
    admissions: int = 8
    patience_s: float = 1.0
    mixed_prefill_tokens: int = sys.maxsize
    mixed_graph_tokens: int = 0
    piece_tokens: int = 64

    @property
    def finds_prefixes(self) -> bool:
        """Return whether blocks are kept findable. A model with recurrent states needs snapshots for it: a row that
        begins behind cached blocks needs the state after their tokens.
        """
        return self.prefix_cache and (not self.has_state or (self.snapshots > 0 and self.snapshot_tokens > 0))

    def cuts(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where chunks that begin at these positions end, in long enough prompts. [n]

        A chunk ends at the next multiple of the chunk size or boundary with a snapshot. Both depend on the request
        alone.
        """
        size, every = self.prefill_chunk, (self.snapshot_tokens if self.snapshots else 0) or self.prefill_chunk
        ends: NDArray[np.int64] = np.minimum((starts // size + 1) * size, (starts // every + 1) * every)
        return ends

    def mixed_tokens(self, decoding: int, waiting: int) -> int:
        """Return the most prompt tokens of a launch with `decoding` rows while `waiting` prompt tokens wait.

        A launch of up to mixed_graph_tokens query tokens costs little more than its decoding rows alone, which read all
        weights. So prompts that two such launches can take are spread over them, and more prompts over two launches of
        twice the size. Chunks are then cut into pieces that end at multiples of piece_tokens. If more prompt tokens
        wait, or mixed_graph_tokens is 0, the bound is mixed_prefill_tokens, and chunks stay whole.
        """
        for tokens in (self.mixed_graph_tokens, 2 * self.mixed_graph_tokens):
            room = tokens - decoding
            if 4 * self.piece_tokens <= room < self.mixed_prefill_tokens and waiting <= 2 * room:
                return room
        return self.mixed_prefill_tokens

    def cut(self, start: int) -> int:
        """Return the end of one chunk: see `cuts`."""
        return int(self.cuts(np.array([start]))[0])
