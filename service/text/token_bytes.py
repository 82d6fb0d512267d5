"""A table of each token's bytes, so that streaming needs no decoder."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from runahead.runtime.grammar.spelling import DecoderError, token_spelling
from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.parameters import MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes by token id; empty for ids without a token, and for special tokens' text.

    longest: the longest tokens' lengths, longest first, one for each log-probability at a position.
    """

    spelled: tuple[bytes, ...]
    special: frozenset[int]
    longest: tuple[int, ...]

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes, special tokens spelled out."""
        return self.spelled[token_id] if token_id < len(self.spelled) else b""

    def text_of(self, token_id: int) -> bytes:
        """Return a token's part of a text: empty for a special token."""
        return b"" if token_id in self.special or token_id >= len(self.spelled) else self.spelled[token_id]

    def text(self, token_ids: Sequence[int], *, include_special: bool) -> str:
        """Return the text of a whole sequence, with U+FFFD for invalid UTF-8."""
        one = self.of if include_special else self.text_of
        return b"".join(map(one, token_ids)).decode("utf-8", "replace")


# For a server without a tokenizer: no token has bytes.
NO_TOKENS: Final = TokenBytes((), frozenset(), ())


def token_bytes(tokenizer: Tokenizer, special: Set[int], description: Mapping[str, Any] | None = None) -> TokenBytes:
    """Make a tokenizer's table, up to the largest supported vocabulary. description: the result of `to_str` if
    available, since it is slow.

    Raises ConfigError for an unsupported kind of decoder.
    """
    try:
        spelled = token_spelling(tokenizer, description or json.loads(tokenizer.to_str()))
    except DecoderError as error:
        raise ConfigError(str(error)) from None
    longest = heapq.nlargest(MAX_TOP_LOGPROBS, map(len, spelled))
    return TokenBytes(tuple(spelled), frozenset(special), tuple(longest))
