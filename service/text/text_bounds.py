"""Bounds the text bytes of a token, so that too long a text is refused before it is tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runahead.runtime.grammar.spelling import CHARACTERS_OF_BYTES
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.contract.errors import Violation, invalid_argument
from runahead.service.text.token_bytes import TokenBytes

_COMPOSED: Final = 3  # bytes that canonical composition may reduce to one: a Hangul syllable, 9 to 3
_BYTE_NAMES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))
_KEEPING: Final = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Split"}
)  # kinds that only split, if they remove nothing


def longest_token_bytes(description: Mapping[str, Any], table: TokenBytes) -> int | None:
    """Return the most UTF-8 bytes of text that one token stands for, None if unknown: for tokenizers that drop
    characters or merge any number of them.

    description: the text of `tokenizer.json`.
    """
    model, added = description["model"], description["added_tokens"]
    factor = _shrinks_by(description["normalizer"])
    if model["type"] != "BPE" or not factor or not _keeps_all(description["pre_tokenizer"]):
        return None
    # Without these some characters have no token.
    alphabet = _BYTE_NAMES if model.get("byte_fallback") else CHARACTERS_OF_BYTES
    if not model["vocab"].keys() >= set(alphabet) or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    longest = max((len(token["content"].encode()) for token in added), default=1)
    return factor * max(longest, table.longest[0])


def check_can_fit(text: str, longest_token: int | None, info: EngineInfo, field: str = "text") -> None:
    """Check that a text may fit the context. Raises ServiceError (INVALID_ARGUMENT).

    longest_token: see `longest_token_bytes`. field: the text's path.
    """
    if longest_token is None:
        return
    size, longest_prompt = len(text.encode()), info.context_length - 1
    least = ceil_div(size, longest_token)
    if least > longest_prompt:
        sentence = (
            f"{field} has {size} bytes, which are at least {least} tokens, and the context of {info.context_length} "
            f"leaves room for a prompt of {longest_prompt}"
        )
        raise invalid_argument([Violation(field, sentence)])


def _shrinks_by(normalizer: Mapping[str, Any] | None) -> int:
    """Return the most bytes that the normalizer reduces to one, 0 if unknown."""
    match normalizer:
        case None | {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return 1  # it replaces a space by more bytes, which the token table maps back to a space
        case {"type": "NFC"}:
            return _COMPOSED
        case {"type": "Sequence", "normalizers": list(parts)}:
            factor = 1
            for part in parts:
                factor *= _shrinks_by(part)
            return factor
    return 0


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in _KEEPING and pre_tokenizer.get("behavior") != "Removed"
