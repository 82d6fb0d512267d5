"""A tensor-parallel rank's part of a model, and the division of equal things among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class ShareError(ValueError):
    """Ranks can't have equal parts."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of rank `rank` of `of` ranks. Raises ShareError for an invalid rank.

    Additions to the residual are partial sums, which are summed over ranks. A bias is added by the first rank.
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
        """Return the rank's own of `count` things: adjacent, equally many for each rank. what: their name in the error.
        Raises ShareError.
        """
        each, rest = divmod(count, self.of)
        if rest:
            raise ShareError(
                f"{self.of} ranks can't have equal parts of {count} {what}; the number of ranks must divide {count}"
            )
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads_of(self, count: int) -> range:
        """Return the KV heads of the rank's query heads. With fewer KV heads than ranks, several ranks have the same
        head. Raises ShareError if neither number divides the other.
        """
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
