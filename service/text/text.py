"""The text of a completion while its tokens arrive: whole characters, stop strings, and which tokens are kept."""

from __future__ import annotations

import codecs
from collections import deque

import msgspec

from runahead.service.text.stop_strings import StopMatch, StopMatcher
from runahead.service.text.token_bytes import TokenBytes


class TextPiece(msgspec.Struct, frozen=True):
    """What has become certain: text to append, and how many more tokens are kept, in the order they were pushed."""

    text: str
    tokens: int


class CompletionText:
    """Turns tokens into text that is never taken back.

    The text is that of all the tokens' bytes read as UTF-8 at once, with U+FFFD for bytes that are not UTF-8; an
    incomplete character waits for its end. Where a stop string may have begun, text waits too. A token is kept if it
    begins before the end of the kept text, and a token that begins inside a character begins where the character does;
    without stop strings every token is kept, and at once. Constant time a token, amortised, for a fixed set of stop
    strings.

    A special token has no text, unless its text is a stop string: then it ends the completion as that string does.
    """

    def __init__(self, table: TokenBytes, stops: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self._table = table
        self._stops = frozenset(stop.encode() for stop in stops)
        self._include_stop = include_stop
        self._partial = b""  # the beginning of a character
        self._matcher = StopMatcher(stops) if stops else None
        self._match: StopMatch | None = None
        self._held = ""  # text that is decoded and not yet certain
        self._emitted = 0  # characters that are certain
        self._starts: deque[int] = deque()  # where each uncertain token begins, in characters
        self.completion_tokens = 0  # tokens that are certain

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text. Nothing may be pushed once there is one."""
        return self._match.stop if self._match else None

    def push(self, token_id: int) -> TextPiece:
        """The next token."""
        table = self._table
        data = table.of(token_id) if self.is_stop(token_id) else table.text_of(token_id)
        return self._advance(self._decoded(data), 1)

    def is_stop(self, token_id: int) -> bool:
        """The token is special, and its text is a stop string."""
        return token_id in self._table.special and self._table.of(token_id) in self._stops

    def finish(self, silent_tokens: int = 0) -> TextPiece:
        """The end: all that waited, and then `silent_tokens` that ended the completion and are left out of its text.

        What waited may itself complete a stop string; nothing after it is kept then.
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
