"""Collects the violations of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from runahead.service.contract.errors import Violation, invalid_argument
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.unknown_fields import unknown_fields

T = TypeVar("T")

NO_TOKENIZER: Final = "is not supported by this server, which was started without a tokenizer: it takes token ids only"


class Violations:
    """Collects violations."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def require(self, good: bool, field: str, sentence: str) -> bool:
        """Record `field sentence` unless `good`. Returns `good`."""
        if not good and len(self._found) < LIMITS.violations:
            self._found.append(Violation(field, f"{field} {sentence}"))
        return good

    def require_at_most(self, limit: int, count: int, field: str) -> bool:
        """Record a list of more than `limit` entries. Returns whether the list is short enough."""
        return self.require(count <= limit, field, f"must have at most {limit} entries, and has {count}")

    def require_ids(self, ids: Sequence[int], limit: int, vocab_size: int, field: str) -> Sequence[int]:
        """Record too many ids, or ids not below `vocab_size` by index. Returns the ids if valid."""
        if not ids or not self.require_at_most(limit, len(ids), field):
            return ()
        # Ids are uint32 on the wire; int64 holds them all.
        return ids if self.require_range(np.fromiter(ids, np.int64, len(ids)), vocab_size, field) else ()

    def require_range(self, ids: NDArray[np.int32] | NDArray[np.int64], vocab_size: int, field: str) -> bool:
        """Record ids not below `vocab_size` by index. Returns whether there are none."""
        wrong: list[int] = np.flatnonzero(ids >= vocab_size).tolist()
        self.require_none(field, wrong, lambda at: (f"{field}[{at}]", id_sentence(int(ids[at]), vocab_size)))
        return not wrong

    def require_between(self, low: float, value: float, high: float, field: str) -> bool:
        """Record a value outside its bounds. Returns whether it is inside."""
        sentence = f"must be {_shown(low)} to {_shown(high)}, and is {_shown(value)}"
        return self.require(low <= value <= high, field, sentence)

    def require_none(self, field: str, wrong: Sequence[T], described: Callable[[T], tuple[str, str]]) -> None:
        """Record the first wrong entries of a list and the number of the others. described: an entry's path and
        sentence.
        """
        for entry in wrong[: LIMITS.list_violations]:
            self.require(False, *described(entry))
        more = len(wrong) - LIMITS.list_violations
        self.require(more <= 0, field, f"has {more} more such entries")

    def require_sizes(self, sizes: Sequence[int], most: int, field: str) -> None:
        """Record texts that are empty or larger than `most`. sizes: bytes in UTF-8."""
        wrong = [index for index, size in enumerate(sizes) if not 0 < size <= most]
        sentence = f"must be 1 to {most} bytes of UTF-8, and has"
        self.require_none(field, wrong, lambda at: (f"{field}[{at}]", f"{sentence} {sizes[at]}"))

    def require_known(self, request: Message) -> None:
        """Record unknown fields: a newer client's field is refused, never ignored."""
        self.require_none("request", list(unknown_fields(request, LIMITS.unknown_bytes).items()), lambda item: item)

    def raise_if_any(self) -> None:
        """Raise ServiceError (INVALID_ARGUMENT) with the recorded violations, if any."""
        if self._found:
            raise invalid_argument(self._found)


def id_sentence(token_id: int, vocab_size: int) -> str:
    """Say why an id is invalid."""
    return f"is token id {token_id}, and the vocabulary has {vocab_size}"


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
