"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the row's newest tokens.

Among earlier positions of the newest token, it takes the one with the longest match before it, up to LONGEST tokens in
all, and the latest of equal ones. Longer matches propose more tokens: 1, 2 or 4 for a match of 1, 2 or 3 tokens, then
as many as requested. If fewer tokens lie between that position and the row's end, the proposal continues into itself,
so a repeating row is followed.

Source: Saxena, "Prompt lookup decoding", 2023, whose search takes the earliest position of the longest match.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

NO_DRAFT: Final = -1  # no draft: differs from every token


class Drafter(ABC):
    """Guesses tokens of rows, by row slot, from data on the device.

    A proposal depends only on the row's tokens, not on other rows or on how its tokens arrived (in which chunks, from
    the prefix cache, again after an eviction).
    """

    def read(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """Record the row's tokens from position `start` on, [n]. Position 0 begins a new row."""
        return

    def took(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Record tokens that S kept, by slot and position. [n], [n], [n]"""
        return

    @abstractmethod
    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        """Propose up to `count` tokens after the first `lengths` [n] tokens of these rows [n], at least 1 each.

        Returns int32 [n, count], with NO_DRAFT after a row's last proposal.
        """

    def memory(self) -> Mapping[str, NDArray[np.generic]]:
        """Return the data that the host knows too, by the names of `runahead.runtime.engine.row_check.OF_A_DRAFTER`,
        without copying.
        """
        return {}

    def poison(self, slot: int) -> None:
        """Overwrite the data of a released row slot, in the test mode."""
        return


LONGEST: Final = 4  # most compared tokens
_POISON: Final = -(1 << 20)


class NgramDrafter(Drafter):
    """Proposes what followed before.

    history: int32 [max_rows + 1, context_length], tokens by row slot and position. Entries beyond a row's length are
    ignored.
    """

    def __init__(self, max_rows: int, context_length: int) -> None:
        self.history = np.zeros((max_rows + 1, context_length), np.int32)

    def read(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        self.history[slot, start : start + tokens.size] = tokens

    def took(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        self.history[slots, positions] = tokens

    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        proposed = np.full((slots.size, count), NO_DRAFT, np.int32)
        if not slots.size:
            return proposed
        longest = int(lengths.max())
        known = self.history[slots, :longest]
        row, follows, agreeing = _matches(known, lengths)
        if not row.size:
            return proposed
        # Positions are ordered by row, ascending: a row's best has the highest number.
        first = np.flatnonzero(np.diff(row, prepend=-1))
        agreeing, follows = np.divmod(np.maximum.reduceat(agreeing * longest + follows, first), longest)
        row = row[first]
        offsets = np.arange(count)
        source = follows[:, None] + offsets % (lengths[row] - follows)[:, None]
        there = (offsets < (1 << (agreeing - 1))[:, None]) | (agreeing == LONGEST)[:, None]
        proposed[row] = np.where(there, known[row[:, None], source], NO_DRAFT)
        return proposed

    def memory(self) -> Mapping[str, NDArray[np.generic]]:
        return {"history": self.history}

    def poison(self, slot: int) -> None:
        self.history[slot] = _POISON


def _matches(
    known: NDArray[np.int32], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find earlier positions of rows' newest tokens, by row, ascending.

    known: [n, longest], tokens of n rows by position. lengths: [n]. Returns the row, the following position and the
    length of the match, [m] each.
    """
    newest = known[np.arange(lengths.size), lengths - 1]
    row, position = (known == newest[:, None]).nonzero()
    earlier = position < lengths[row] - 1
    row, position = row[earlier], position[earlier]
    last = lengths[row] - 1
    agreeing, agrees = np.ones(row.size, np.int64), np.ones(row.size, np.bool_)
    for back in range(1, LONGEST):
        same = known[row, np.maximum(position - back, 0)] == known[row, np.maximum(last - back, 0)]
        agrees &= same & (position >= back)
        agreeing += agrees
    return row, position + 1, agreeing
