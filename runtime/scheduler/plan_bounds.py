"""Bounds that every plan keeps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FORCED_ROWS: Final = 8  # that decode in a launch in which something is forced, at most


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Words are int32 words of the rings' slots.

    penalty_slots: rows that may have penalties at a time. prefix_cache: full blocks are found again by their content.
    drafts: no launch brings more than 1 + drafts tokens of a row, unless the row has a grammar: then 1 + forced_drafts,
    if that is more, and no more than forced_rows rows decode. In a launch of many rows a query token costs nearly what
    it brings, and all rows pay for it. draft_rows: above 0, launches with drafts are forms of their own, of up to so
    many rows, all of which decode and cost as many query tokens; 0: any launch may have drafts, and a row without some
    costs one query token. history: the device is told of tokens that the cache holds, since its drafter looks at them.
    guesses_along_masks: the drafter guesses for rows with a grammar, too.
    has_state: a row holds a state slot beside its blocks, and a prefix is found up to a snapshot of the state alone.
    snapshots: of states, that there is room for. snapshot_tokens: from one border with a snapshot to the next; 0: only
    the states behind shared prompts are kept. state_unit: a prompt that is cut at multiples of so many tokens leaves
    the state that it leaves in one piece.
    admissions: rows that may begin with one launch: to make their records takes the loop's time, which is everybody's.
    patience_s: how long a caller waits without a row before a row of another one leaves.
    mixed_prefill_tokens: prompt tokens that a launch may carry while rows decode in it, unless they are one chunk.
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

    @property
    def finds_prefixes(self) -> bool:
        """Blocks are kept findable."""
        return self.prefix_cache and (not self.has_state or (self.snapshots > 0 and self.snapshot_tokens > 0))

    def cuts(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where chunks that begin at these positions end, if their prompts are long enough: at a multiple of the chunk
        size, or at a border with a snapshot, so that a chunk never goes beyond one. Either depends on the request
        alone. [n]"""
        size, every = self.prefill_chunk, (self.snapshot_tokens if self.snapshots else 0) or self.prefill_chunk
        ends: NDArray[np.int64] = np.minimum((starts // size + 1) * size, (starts // every + 1) * every)
        return ends

    def cut(self, start: int) -> int:
        """The same for one of them."""
        return int(self.cuts(np.array([start]))[0])
