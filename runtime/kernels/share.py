"""The part of a model that one tensor-parallel rank has, and how a count of equal things is divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class ShareError(ValueError):
    """Ranks can't have equal parts of something."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of rank `rank`, of the ranks 0 to `of` - 1. Raises ShareError for a rank outside this range.

    What adds to the residual is a partial sum of each rank: the sums of all ranks make what the whole layer adds. A
    bias that is added once is the first rank's.
    """

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise ShareError(f"there is no rank {self.rank} of {self.of}; ranks are numbered from 0 on")

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part_of(self, count: int, what: str) -> range:
        """Which of `count` things are the rank's own: the same number for each rank, adjacent. what: their name in the
        error. Raises ShareError."""
        each, rest = divmod(count, self.of)
        if rest:
            raise ShareError(
                f"{self.of} ranks can't have equal parts of {count} {what}; the number of ranks must divide {count}"
            )
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads_of(self, count: int) -> range:
        """Which of `count` KV heads the rank's query heads read. Where there are fewer KV heads than ranks, several
        ranks hold the same head. Raises ShareError where one count does not divide the other."""
        if count >= self.of:
            return self.part_of(count, "KV heads")
        ranks_each, rest = divmod(self.of, count)
        if rest:
            raise ShareError(
                f"{self.of} ranks can't repeat {count} KV heads equally; the number of KV heads must divide {self.of}"
            )
        head = self.rank // ranks_each
        return range(head, head + 1)


WHOLE: Final = Share()
