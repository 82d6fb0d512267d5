"""Masks behind drafts: along which drafts they are made, and what they leave out."""

from __future__ import annotations

import numpy as np

from runahead.runtime.drafters.ngram import NgramDrafter
from runahead.runtime.masks.masks import Stops
from tests.runtime.late_masks import MadeUpMatcher
from tests.runtime.masks.test_grammar_rows import Kept


def test_a_row_that_was_evicted_is_not_taken_to_have_what_was_forced_in_its_slot_before() -> None:
    """Its new slot has no forced run, so that the device asks its drafter."""

    class Forced(MadeUpMatcher):
        """Two tokens may come, and its look ahead, which takes 6 ms, says that one of them must."""

        def deep_copy(self) -> MadeUpMatcher:
            return Forced(self._grammar, self._said)

        def allowed(self) -> list[int]:
            return [5, 6, 7]

        def compute_ff_tokens(self) -> list[int]:
            now[0] += 6_000_000
            return [5, 6, 7]

    now, drafter = [0], NgramDrafter(4, 64)
    kept = Kept(3, drafter, spent=lambda: now[0])
    kept.rows.open(1, "any 9")
    kept.compile("any 9", Forced("any 9"))
    prompt = np.array([5, 7, 7, 9, 90, 91], np.int32)
    kept.rows.place(1, 0, 3, prompt.size, prompt)
    kept.rows.place(1, 2, 4, prompt.size, prompt)
    drafter.read(1, 0, np.append(prompt, [5]))
    assert drafter.propose(np.array([1]), np.array([prompt.size + 1]), 1)[0].tolist() == [7]
    kept.take(1, 5, guesses=1)
    assert kept.allowed(2, 4, prompt.size + 1, 7) is not None
    assert kept.allowed(2, 4, prompt.size + 1, 6) is None


def test_behind_drafts_the_minimum_counts_at_the_place_that_the_mask_is_for() -> None:
    """The minimum is reached behind the first of two drafts: from there on a stop id may come."""

    class Free(MadeUpMatcher):
        def deep_copy(self) -> MadeUpMatcher:
            return Free(self._grammar, self._said)

        def allowed(self) -> list[int]:
            return [5, 6]

        def compute_ff_tokens(self) -> list[int]:
            return [5, 5, 5]

    kept = Kept(drafts=3)
    kept.rows.open(1, "any 9", Stops((6,), 12))
    kept.compile("any 9", Free("any 9"))
    kept.rows.place(1, 0, 3, 10)
    kept.take(1, 5)
    assert kept.allowed(0, 3, 11) == [5]
    assert kept.allowed(0, 3, 11, 5) == [5, 6] == kept.allowed(0, 3, 11, 5, 5)
