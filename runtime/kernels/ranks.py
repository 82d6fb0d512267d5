"""A tensor-parallel rank's part of a model, and how ranks exchange numbers within a launch.

A model calls `reduce` where a product that is cut by its inputs ends (embedding, attention output, feed-forward
output). `gather` brings logits to the first rank (on a CPU the program calls it, in S), and `collect` what ranks found
in their parts of the vocabulary. A program calls `spread` for what only the first rank decides. Every rank
makes the same calls in the same order: the plan and the row state, which are the same on all ranks, decide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class ShardError(ValueError):
    """Ranks can't have equal parts."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `of` ranks. Raises ShardError for an invalid rank.

    Additions to the residual are partial sums, which are summed over ranks. A bias is added by the first rank.
    """

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise ShardError(f"there is no rank {self.rank} of {self.of}; ranks are numbered from 0 on")

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part_of(self, count: int, what: str) -> range:
        """Return the rank's own of `count` things: adjacent, equally many for each rank. what: their name in the error.
        Raises ShardError.
        """
        each, rest = divmod(count, self.of)
        if rest:
            raise ShardError(
                f"{self.of} ranks can't have equal parts of {count} {what}; the number of ranks must divide {count}"
            )
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads_of(self, count: int) -> range:
        """Return the KV heads of the rank's query heads. With fewer KV heads than ranks, several ranks have the same
        head. Raises ShardError if neither number divides the other.
        """
        if count >= self.of:
            return self.part_of(count, "KV heads")
        ranks_each, rest = divmod(self.of, count)
        if rest:
            raise ShardError(
                f"{self.of} ranks can't repeat {count} KV heads equally; the number of KV heads must divide {self.of}"
            )
        head = self.rank // ranks_each
        return range(head, head + 1)


WHOLE: Final = Shard()


class RanksError(RuntimeError):
    """An exchange failed: a peer is gone or late, or makes another call. The sentence names the rank and the call."""


class Ranks(Protocol):
    """The exchange as one rank sees it."""

    @property
    def shard(self) -> Shard: ...

    def reduce(self, partial: torch.Tensor) -> None:
        """Replace `partial` by the sum of the ranks' partials, as `fold` defines it. float32, or bfloat16 on a GPU,
        where the sum is rounded once; contiguous, of the same shape on every rank. Raises RanksError."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the ranks' parts on the first rank. part: float32 [n, width], the same shape on every rank. Returns
        the parts side by side in rank order there, [n, ranks * width], and [n, 0] on the others. On a GPU they are good
        until the next call. Raises RanksError."""

    def spread(self, words: Any) -> None:
        """Replace `words` by the first rank's. int32, contiguous, of the same shape on every rank; an array, or on a
        GPU a tensor. Raises RanksError."""


class VocabRanks(Ranks, Protocol):
    """The exchange on a CPU, where each rank samples from its part of the vocabulary."""

    def collect(self, words: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return every rank's words in rank order, [ranks, ...], on every rank. words: contiguous, of the same shape on
        every rank. Raises RanksError."""


class DeviceRanks(Ranks, Protocol):
    """The exchange on a GPU: sums that go on to the residual, and tokens chosen of a vocabulary in parts."""

    def reduce_add(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        following: torch.Tensor,
        scaled: torch.Tensor,
        squares: torch.Tensor,
    ) -> int:
        """`residual += ` the sum that `reduce` makes of `partial`. `scaled` becomes the residual times `following`, the
        weight of the norm that follows, and the first rows of `squares`, float64 [1 or more, T or more], the sums of
        the squares of equal parts of the residual's rows. Returns the number of parts. All other tensors bfloat16
        [T, H] contiguous, `following` [H]."""

    def gather_rows(self, part: torch.Tensor, indexes: torch.Tensor | None) -> torch.Tensor:
        """Do as `gather` with these rows of `part`. indexes: int [n]; None: all rows. Returns [n, ranks * width] on the
        first rank."""

    def best(self, scores: torch.Tensor, tokens: torch.Tensor, rows: int) -> None:
        """Leave the highest score of each peer's row and its token, the lowest among equals, in the last ranks - 1
        columns of the row, in rank order. scores: float32 [rows or more, columns] contiguous; tokens: int32, the same.
        A rank's own are in the other columns."""


class OneRank:
    """The exchange of a model that is whole: nothing to do."""

    shard: Final = WHOLE

    def reduce(self, partial: torch.Tensor) -> None:
        pass

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def spread(self, words: Any) -> None:
        pass


ONE_RANK: Final = OneRank()


def fold(partials: Sequence[NDArray[np.float32]], out: NDArray[Any]) -> None:
    """The sum over ranks: ((p0 + p1) + p2) + ..., in rank order, each addition rounded to float32. A partial of -0.0
    counts as +0.0, so that -0.0 can mark memory that a peer has not written yet. out may be one of the partials' own
    memory only if it is the first. All have one shape."""
    np.add(partials[0], np.float32(0.0), out=out)
    for partial in partials[1:]:
        np.add(out, partial, out=out)
