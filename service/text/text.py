"""Builds a completion's text from arriving tokens: whole characters, stop strings and kept tokens."""

from __future__ import annotations

import codecs
from collections import deque

import msgspec

from runahead.service.text.stop_strings import StopMatch, StopMatcher
from runahead.service.text.token_bytes import TokenBytes


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
