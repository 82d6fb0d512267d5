"""The text of a completion from its tokens: their bytes by table, without a decoder, and stop strings across pieces."""

from __future__ import annotations

import codecs
import heapq
import json
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import msgspec
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


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A match: the string `stop` ends before character `end` of the text."""

    stop: str
    end: int

    @property
    def start(self) -> int:
        return self.end - len(self.stop)


class StopMatcher:
    """Finds the stop string that completes first, and the longer of two that complete at the same character.

    Uses an automaton of Knuth, Morris and Pratt for each string: amortized constant time a character, however the text
    is cut. The state is the length of the string's prefix that the text ends with.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        # Longest first, so the first match at a character is the longest.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(stops)
        self._seen = 0  # characters

    @property
    def held(self) -> int:
        """The number of last characters that may begin a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Return the first match that `text` completes. Feed nothing after a match."""
        for character in text:
            self._seen += 1
            for which, stop in enumerate(self._stops):
                state, fallbacks = self._states[which], self._fallbacks[which]
                while state and stop[state] != character:
                    state = fallbacks[state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    return StopMatch(stop, self._seen)
                self._states[which] = state
        return None


def _fallbacks(stop: str) -> list[int]:
    """Return for each prefix of `stop` the length of its longest proper prefix that is also a suffix."""
    fallbacks = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = fallbacks[length - 1]
        if stop[length] == stop[index]:
            length += 1
        fallbacks[index] = length
    return fallbacks


class TextPiece(msgspec.Struct, frozen=True):
    """Newly certain output: text to append, and the number of further kept tokens, in the order of pushes."""

    text: str
    tokens: int


class CompletionText:
    """Turns tokens into text that is never retracted.

    The text is the UTF-8 decoding of all tokens' bytes, with U+FFFD for invalid bytes; incomplete characters and
    possible beginnings of stop strings are withheld. A token is kept if it begins before the end of the kept text; one
    that begins inside a character begins where the character does. Without stop strings every token is kept at once.
    Amortized constant time a token for a fixed set of stop strings.

    A special token has no text, unless its text is a stop string: then it ends the completion like the string.
    """

    def __init__(self, table: TokenBytes, stops: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self._table = table
        self._stops = frozenset(stop.encode() for stop in stops)
        self._include_stop = include_stop
        self._partial = b""  # bytes of an incomplete character
        self._matcher = StopMatcher(stops) if stops else None
        self._match: StopMatch | None = None
        self._held = ""  # decoded text that is not certain yet
        self._emitted = 0  # characters that are certain
        self._starts: deque[int] = deque()  # the first character of each uncertain token
        self.completion_tokens = 0  # tokens that are certain

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, after which nothing may be pushed."""
        return self._match.stop if self._match else None

    def push(self, token_id: int) -> TextPiece:
        """Push the next token."""
        table = self._table
        data = table.of(token_id) if self.is_stop(token_id) else table.text_of(token_id)
        return self._advance(self._decoded(data), 1)

    def is_stop(self, token_id: int) -> bool:
        """Whether the token is special and its text is a stop string."""
        return token_id in self._table.special and self._table.of(token_id) in self._stops

    def finish(self, silent_tokens: int = 0) -> TextPiece:
        """End the text: flush withheld text, then `silent_tokens` that ended the completion and have no text.

        Withheld text may complete a stop string; nothing after it is kept then.
        """
        piece = self._advance(self._decoded(b"", final=True), 0)
        if self._match:
            return piece
        text, self._held = self._held, ""
        return TextPiece(piece.text + text, piece.tokens + self._keep(len(self._starts)) + self._count(silent_tokens))

    def _decoded(self, data: bytes, *, final: bool = False) -> str:
        if self._partial:
            data = self._partial + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._partial = data[used:]
        return text

    def _advance(self, new: str, tokens: int) -> TextPiece:
        if self._matcher is None:
            return TextPiece(new, self._count(tokens))
        self._starts.extend([self._emitted + len(self._held)] * tokens)
        self._match = self._matcher.feed(new)
        self._held += new
        if self._match:
            end = self._match.end if self._include_stop else self._match.start
            certain = end - self._emitted
        else:
            certain = len(self._held) - self._matcher.held
        text, self._held = self._held[:certain], self._held[certain:]
        self._emitted += certain
        kept = 0
        while kept < len(self._starts) and self._starts[kept] < self._emitted:
            kept += 1
        return TextPiece(text, self._keep(kept))

    def _keep(self, tokens: int) -> int:
        for _ in range(tokens):
            self._starts.popleft()
        return self._count(tokens)

    def _count(self, tokens: int) -> int:
        self.completion_tokens += tokens
        return tokens
