"""The bytes that each token stands for: a table made once, so that text needs no decoder while it streams.

A decoder of the byte-level or of the SentencePiece kind maps every token to bytes on its own, and text is these bytes,
concatenated, read as UTF-8. Only what such a decoder does at the very start of a text (dropping one space) is left
out here: a completion continues a prompt, and its first space belongs to it.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.parameters import MAX_TOP_LOGPROBS

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEP = Callable[[str], str | bytes]


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


# Of a server without a tokenizer: no token has bytes, and no text comes of any.
NO_TOKENS: Final = TokenBytes((), frozenset(), ())


def token_bytes(tokenizer: Tokenizer, special: Set[int], description: Mapping[str, Any] | None = None) -> TokenBytes:
    """The table of a tokenizer. description: what its `to_str` says, if that is there already, since it takes a while.

    Raises ConfigError for a kind of decoder that is not supported.
    """
    steps = _steps((description or json.loads(tokenizer.to_str()))["decoder"])
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    spelled = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        spelled[token_id] = _spell(token, steps)
    longest = heapq.nlargest(MAX_TOP_LOGPROBS, map(len, spelled))
    return TokenBytes(tuple(spelled), frozenset(special), tuple(longest))


def _spell(token: str, steps: tuple[_STEP, ...]) -> bytes:
    value: str | bytes = token
    for step in steps:
        if isinstance(value, bytes):
            break
        value = step(value)
    return value if isinstance(value, bytes) else value.encode()


def _steps(decoder: Any) -> tuple[_STEP, ...]:
    kind = decoder["type"] if decoder else None
    if kind == "Sequence":
        return tuple(step for part in decoder["decoders"] for step in _steps(part))
    if kind == "ByteLevel":
        return (_byte_level,)
    if kind == "ByteFallback":
        return (_byte_fallback,)
    if kind == "Metaspace":
        return (_replace(decoder["replacement"], " "),)
    if kind == "Replace" and "String" in decoder["pattern"]:
        return (_replace(decoder["pattern"]["String"], decoder["content"]),)
    if kind == "Fuse" or (kind == "Strip" and decoder["stop"] == 0):
        return ()  # joins what is joined anyway; strips at the start of a text
    raise ConfigError(
        f"the tokenizer's decoder ({kind or 'none'}) is not supported: it must be of the byte-level or the "
        "SentencePiece kind"
    )


def _replace(old: str, new: str) -> _STEP:
    return lambda token: token.replace(old, new)


def _byte_fallback(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token


def _byte_level(token: str) -> bytes:
    """Byte-level BPE writes each byte as a printable character; a token with any other character is plain text."""
    try:
        return bytes(_CHARACTER_TO_BYTE[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet: printable Latin-1 bytes stand for themselves, the others
    are moved beyond it, in order (the alphabet that GPT-2 introduced)."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in themselves]
    table = {chr(byte): byte for byte in themselves}
    table.update({chr(256 + place): byte for place, byte in enumerate(moved)})
    return table


_CHARACTER_TO_BYTE: Final = _byte_characters()
CHARACTERS_OF_BYTES: Final = frozenset(_CHARACTER_TO_BYTE)  # the byte-level alphabet
