"""Prompt lookup: what followed when the row's newest tokens stood there before is proposed to follow again.

Of the earlier places at which the row's newest token stands, one is taken at which the most tokens before it agree too,
up to LONGEST in all, and of several such the latest. The more agree, the more tokens are proposed: 1, 2 or 4 where 1, 2
or 3 tokens agree, then as many as are asked for. Where fewer tokens lie between that place and the row's end, the
proposal goes on into itself, so that a row that repeats itself is followed through.

Source: Saxena, "Prompt lookup decoding", 2023, whose search takes the earliest place of the longest match.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

NO_DRAFT: Final = -1  # in the place of a draft: none. No token that is sampled equals it


class Drafter(ABC):
    """Guesses tokens of rows, by row slot, from what the device itself knows of them.

    What it proposes is a function of a row's own tokens: neither of its neighbours, nor of how its tokens came (in
    which chunks, from the prefix cache, again after an eviction).
    """

    def read(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """The row in this slot has these tokens from position `start` on, [n]. A row begins with what is read at
        position 0."""
        return

    def took(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """S has kept these tokens of rows in these slots, at these positions. [n], [n], [n]"""
        return

    @abstractmethod
    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        """Up to `count` tokens that may follow the first `lengths` [n] tokens of these rows [n], at least 1 each.

        Returns int32 [n, count], NO_DRAFT where it has none; behind one of these comes no token of the row.
        """

    def memory(self) -> Mapping[str, NDArray[np.generic]]:
        """What it keeps that the host knows too, under names of `runahead.runtime.engine.row_check.OF_A_DRAFTER`: the
        arrays themselves."""
        return {}

    def poison(self, slot: int) -> None:
        """Nonsense in the place of what it knows of a row slot that nobody may name any more: of the test mode."""
        return


LONGEST: Final = 4  # tokens that are compared
_POISON: Final = -(1 << 20)


class NgramDrafter(Drafter):
    """Proposes what followed before.

    history: int32 [max_rows + 1, context_length], a row's tokens by row slot and position. What lies beyond a row's
    length is not looked at.
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
        row, follows, agreeing = _places(known, lengths)
        if not row.size:
            return proposed
        # Places come row by row, ascending: the best of a row is its highest number.
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


def _places(
    known: NDArray[np.int32], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where the newest token of rows stands before, row by row, ascending.

    known: [n, longest], tokens of n rows by position. lengths: [n]. Returns the row, the position that follows, and how
    many tokens agree, [m] each.
    """
    newest = known[np.arange(lengths.size), lengths - 1]
    row, place = (known == newest[:, None]).nonzero()
    earlier = place < lengths[row] - 1
    row, place = row[earlier], place[earlier]
    last = lengths[row] - 1
    agreeing, agrees = np.ones(row.size, np.int64), np.ones(row.size, np.bool_)
    for back in range(1, LONGEST):
        same = known[row, np.maximum(place - back, 0)] == known[row, np.maximum(last - back, 0)]
        agrees &= same & (place >= back)
        agreeing += agrees
    return row, place + 1, agreeing
