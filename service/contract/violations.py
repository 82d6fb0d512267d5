"""What is wrong with a request, collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from runahead.service.contract.errors import Violation, invalid_argument
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.unknown_fields import unknown_fields

NO_TOKENIZER: Final = "is not supported by this server, which was started without a tokenizer: it takes token ids only"


class Violations:
    """Collects what is wrong with a request."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def require(self, good: bool, field: str, sentence: str) -> bool:
        """Notes `field sentence` unless `good`. Returns `good`."""
        if not good and len(self._found) < LIMITS.violations:
            self._found.append(Violation(field, f"{field} {sentence}"))
        return good

    def require_at_most(self, limit: int, count: int, field: str) -> bool:
        """Notes a list of more than `limit` entries. Returns whether it has no more."""
        return self.require(count <= limit, field, f"must have at most {limit} entries, and has {count}")

    def require_ids(self, ids: Sequence[int], limit: int, vocab_size: int, field: str) -> Sequence[int]:
        """Notes too many ids, or else those that are not below `vocab_size`, by their index. Returns good ids."""
        if not ids or not self.require_at_most(limit, len(ids), field):
            return ()
        # Ids are uint32 on the wire; int64 holds them all.
        return ids if self.require_range(np.fromiter(ids, np.int64, len(ids)), vocab_size, field) else ()

    def require_range(self, ids: NDArray[np.int32] | NDArray[np.int64], vocab_size: int, field: str) -> bool:
        """Notes ids that are not below `vocab_size`, by their index. Returns whether there are none."""
        wrong = [int(index) for index in np.flatnonzero(ids >= vocab_size)]
        sentences = {
            f"{field}[{index}]": id_sentence(int(ids[index]), vocab_size) for index in wrong[: LIMITS.list_violations]
        }
        self.require_none(sentences, field, len(wrong))
        return not wrong

    def require_none(self, sentences: Mapping[str, str], field: str, count: int) -> None:
        """Notes the wrong entries of a list, each by its path, and how many more there are. count: of all of them."""
        for path, sentence in sentences.items():
            self.require(False, path, sentence)
        more = count - len(sentences)
        self.require(not more, field, f"has {more} more such entries")

    def require_known(self, request: Message) -> None:
        """Notes fields that this server does not know: what a newer client sends is refused, never ignored."""
        sentences = unknown_fields(request, LIMITS.unknown_bytes)
        shown = dict(islice(sentences.items(), LIMITS.list_violations))
        self.require_none(shown, "request", len(sentences))

    def raise_if_any(self) -> None:
        """Raises ServiceError (INVALID_ARGUMENT) with what was noted."""
        if self._found:
            raise invalid_argument(self._found)


def id_sentence(token_id: int, vocab_size: int) -> str:
    """What is wrong with an id."""
    return f"is token id {token_id}, and the vocabulary has {vocab_size}"
