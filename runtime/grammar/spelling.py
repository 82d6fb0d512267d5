"""The bytes of each token of a tokenizer.

Byte-level and SentencePiece decoders map every token to bytes independently, and text is the concatenation decoded as
UTF-8. Their rule for a text's beginning (dropping one space) is left out: a completion continues a prompt, so its first
space belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import Tokenizer

_MOST_IDS: Final = 1 << 22  # more than any vocabulary has
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEP = Callable[[str], str | bytes]


class DecoderError(ValueError):
    """The tokenizer's decoder is not supported. The sentence names it."""


def token_spelling(tokenizer: Tokenizer, description: Mapping[str, Any]) -> list[bytes]:
    """Return bytes by token id, special tokens spelled out, up to the largest supported vocabulary. Ids without a token
    are empty.

    An added token of a byte-level tokenizer is its content, unless the model's vocabulary has it too: only there
    characters stand for bytes. description: the tokenizer's `to_str`. Raises DecoderError.
    """
    steps = _steps(description["decoder"])
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added: set[str] = set()
    if is_byte_level(description["decoder"]):
        added = vocabulary.keys() - tokenizer.get_vocab(with_added_tokens=False).keys()
    known = {token_id: token for token, token_id in vocabulary.items() if token_id < _MOST_IDS}
    spelled = [b""] * (max(known, default=-1) + 1)
    for token_id, token in known.items():
        spelled[token_id] = token.encode() if token in added else _spell(token, steps)
    return spelled


def is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """Whether the decoder in `tokenizer.json` is only byte-level BPE's."""
    if decoder is not None and decoder["type"] == "Sequence":
        return bool(decoder["decoders"]) and all(map(is_byte_level, decoder["decoders"]))
    return decoder is not None and decoder["type"] == "ByteLevel"


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
        return ()  # joining is implied; stripping concerns the start of a text
    raise DecoderError(
        f"the tokenizer's decoder ({kind or 'none'}) is not supported: it must be of the byte-level or the "
        "SentencePiece kind"
    )


def _replace(old: str, new: str) -> _STEP:
    return lambda token: token.replace(old, new)


def _byte_fallback(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token


def _byte_level(token: str) -> bytes:
    """Decode byte-level BPE, which writes each byte as a printable character; a token with any other character is plain
    text.
    """
    try:
        return bytes(_CHARACTER_TO_BYTE[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet: printable Latin-1 bytes map to themselves, the
    others to later code points in order.
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in themselves]
    table = {chr(byte): byte for byte in themselves}
    table.update({chr(256 + place): byte for place, byte in enumerate(moved)})
    return table


_CHARACTER_TO_BYTE: Final = _byte_characters()
CHARACTERS_OF_BYTES: Final = frozenset(_CHARACTER_TO_BYTE)  # the byte-level alphabet
