"""How many drafts a launch verifies of each row that decodes."""

from __future__ import annotations

import sys
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray


class DraftChoice(Protocol):
    """Asked for each launch that is planned anew; told what launches have brought."""

    @property
    def most(self) -> int:
        """No launch verifies more drafts of a row."""

    def drafts(self, number: int, rows: int) -> int:
        """K of launch `number`, in which so many rows may decode."""

    def stays_until(self, number: int) -> int:
        """The last launch that has the same K as launch `number`, which was planned just now, as long as it has the
        same rows."""

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Launch `number`, the next that looked at drafts, is committed. drafted, accepted: of each row how many drafts
        it has looked at, and how many of them were right. [n], [n]"""


class FixedChoice:
    """The same for every launch."""

    def __init__(self, count: int) -> None:
        self.most: Final = count

    def drafts(self, number: int, rows: int) -> int:
        return self.most

    def stays_until(self, number: int) -> int:
        return sys.maxsize

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        pass
