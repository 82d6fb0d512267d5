"""The bytes that each token stands for: a table made once, so that text needs no decoder while it streams."""

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
    """Bytes by token id. An id without a token has none, and so has the text of a special token.

    longest: how many bytes the longest tokens have, longest first, as many as one position may have log-probabilities.
    """

    spelled: tuple[bytes, ...]
    special: frozenset[int]
    longest: tuple[int, ...]

    def of(self, token_id: int) -> bytes:
        """The bytes of a token, special tokens spelled out."""
        return self.spelled[token_id] if token_id < len(self.spelled) else b""

    def text_of(self, token_id: int) -> bytes:
        """What a token contributes to text: nothing for a special token."""
        return b"" if token_id in self.special or token_id >= len(self.spelled) else self.spelled[token_id]

    def text(self, token_ids: Sequence[int], *, include_special: bool) -> str:
        """The text of a whole sequence, with U+FFFD for bytes that are not UTF-8."""
        one = self.of if include_special else self.text_of
        return b"".join(map(one, token_ids)).decode("utf-8", "replace")


# Of a server without a tokenizer: no token has bytes, and no text comes of any.
NO_TOKENS: Final = TokenBytes((), frozenset(), ())


def token_bytes(tokenizer: Tokenizer, special: Set[int], description: Mapping[str, Any] | None = None) -> TokenBytes:
    """The table of a tokenizer, without ids that are beyond any model's vocabulary. description: what its `to_str`
    says, if that is there already, since it takes a while.

    Raises ConfigError for a kind of decoder that is not supported.
    """
    try:
        spelled = token_spelling(tokenizer, description or json.loads(tokenizer.to_str()))
    except DecoderError as error:
        raise ConfigError(str(error)) from None
    longest = heapq.nlargest(MAX_TOP_LOGPROBS, map(len, spelled))
    return TokenBytes(tuple(spelled), frozenset(special), tuple(longest))
