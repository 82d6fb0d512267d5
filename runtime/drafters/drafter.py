"""What a program asks of whatever guesses tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

NO_DRAFT: Final = -1  # in the place of a draft: none. No token that is sampled equals it


class Drafter:
    """Guesses tokens of rows, by row slot, from what the device itself knows of them.

    What it proposes is a function of a row's own tokens: neither of its neighbours, nor of how its tokens came (in
    which chunks, from the prefix cache, again after an eviction).
    """

    def read(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """The row in this slot has these tokens from position `start` on, [n]. A row begins with what is read at
        position 0."""

    def took(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """S has kept these tokens of rows in these slots, at these positions. [n], [n], [n]"""

    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        """Up to `count` tokens that may follow the first `lengths` [n] tokens of these rows [n], at least 1 each.

        Returns int32 [n, count], NO_DRAFT where it has none; behind one of these comes no token of the row.
        """
        raise NotImplementedError

    def memory(self) -> Mapping[str, NDArray[np.generic]]:
        """What it keeps that the host knows too, under names of `runahead.runtime.engine.row_check.OF_A_DRAFTER`: the
        arrays themselves."""
        return {}

    def poison(self, slot: int) -> None:
        """Nonsense in the place of what it knows of a row slot that nobody may name any more: of the test mode."""
