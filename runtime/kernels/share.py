"""Which part of a layer is a rank's own, where several GPUs have a model's experts and heads between them.

Every process of today has all of a model: `WHOLE` is what everything defaults to, and what is still to be built for
others stands in docs/decisions/0013-seats-for-drafts-and-ranks.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class ShareError(ValueError):
    """Ranks can't have equal parts of something."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of rank `rank`, of those from 0 to `of` - 1. Raises ShareError for a rank that is none of these.

    What adds to the residual is a partial sum of each rank: those of all ranks make what the whole layer adds. Whatever
    is not divided, and may be added once, is the first rank's.
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
        """Which of `count` things are the rank's own: as many for each, one behind the other. what: how a sentence
        calls them. Raises ShareError."""
        each, rest = divmod(count, self.of)
        if rest:
            raise ShareError(
                f"{self.of} ranks can't have equal parts of {count} {what}; the number of ranks must divide {count}"
            )
        return range(self.rank * each, (self.rank + 1) * each)


WHOLE: Final = Share()
