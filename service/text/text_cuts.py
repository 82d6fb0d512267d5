"""Finds positions where a text can be cut without changing tokens, from the tokenizer's description.

A byte-level tokenizer first splits a text by a regular expression, and no token spans two pieces. So a text can be cut
between two pieces if the expression splits both sides as it splits the whole. Between a letter and the space before a
next word this holds for every expression made of the alternatives below: none matches a letter followed by a space;
none looks beyond the character after its match; letters up to the cut are matched to the last one with or without
further text; and none looks back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

PIECE: Final = 8192  # characters of a piece: about 10 ms of work
LONG: Final = 4 * PIECE  # characters; a longer piece means that no cut was found

# Between this letter and the following space.
_CUT: Final = re.compile(r"[A-Za-z](?= [A-Za-z])")
# At least one of these must match any letters.
_LETTERS: Final = frozenset(
    {r" ?\p{L}+", r"\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\s\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"}
)
_OTHERS: Final = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
        *("'(?i:[sdmt]|ll|ve|re)", r" \p{L}+"),
        *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", r"\s", r"\n+", r"\r+", r"\t+", " {2,}"),
    }
)
# They search a run of spaces for a line's end, and again at each space without one. One of the second set must match
# the whole run before `\s` matches one of its spaces.
_SCANS_OF_SPACES: Final = frozenset({r"\s*[\r\n]+", r"\s*[\r\n]"})
_MATCH_SPACES: Final = frozenset({r"\s+(?!\S)", r"\s+"})


def can_be_cut(description: Mapping[str, Any]) -> bool:
    """Whether texts can be cut at the positions of `cut_behind`; False if unsure. description: the text of
    `tokenizer.json`.
    """
    model, added = description["model"], description["added_tokens"]
    if model["type"] != "BPE" or model.get("dropout") or not _by_known_alternatives(description["pre_tokenizer"]):
        return False
    # Canonical composition joins no space, nor a letter after one, with preceding text.
    if description["normalizer"] is not None and description["normalizer"]["type"] != "NFC":
        return False
    # Added tokens are matched first: none may span a cut or strip the space after it.
    return not any(" " in token["content"] or (token["rstrip"] and token["content"][-1:].isalpha()) for token in added)


def is_quick(description: Mapping[str, Any]) -> bool:
    """Whether tokenizing time is proportional to the text's length: all regular expressions are known, and none scans
    the same spaces repeatedly. description: see `can_be_cut`.
    """
    parts = [description[name] for name in ("normalizer", "post_processor", "decoder")]
    pre_tokenizer = description["pre_tokenizer"]
    if not _by_known_alternatives(pre_tokenizer) or not _scans_once(_alternatives(_pattern(pre_tokenizer))):
        parts.append(pre_tokenizer)
    return not any(map(_has_expression, parts))


def cut_behind(text: str, start: int, most: int) -> int | None:
    """Return the first cut that makes a piece of at least PIECE characters, or the text's end if that is no further.

    start: of the piece. most: characters to search. None: no cut among them.
    """
    if len(text) - start <= PIECE:
        return len(text)
    found = _CUT.search(text, start + PIECE - 1, min(len(text), start + most + 2))
    if found is not None:
        return found.end()
    return len(text) if len(text) - start <= most else None


def _by_known_alternatives(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return True  # GPT-2's expression, whose alternatives are all known
    alternatives = set(_alternatives(_pattern(pre_tokenizer)))
    return bool(alternatives & _LETTERS) and alternatives <= _LETTERS | _OTHERS


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """Return the expression that splits a text before a byte-level tokenizer; empty if there is none or the
    library's.
    """
    match pre_tokenizer:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return pattern
    return ""


def _scans_once(alternatives: Sequence[str]) -> bool:
    if not _SCANS_OF_SPACES.intersection(alternatives):
        return True
    matches = [index for index, one in enumerate(alternatives) if one in _MATCH_SPACES]
    return bool(matches) and r"\s" not in alternatives[: matches[0]]


def _has_expression(part: Any) -> bool:
    if isinstance(part, Mapping):
        return "Regex" in part or any(map(_has_expression, part.values()))
    return isinstance(part, list) and any(map(_has_expression, part))


def _alternatives(pattern: str) -> list[str]:
    """Split the expression at bars outside brackets."""
    found, depth, in_class, escaped = [""], 0, False, False
    for character in pattern:
        if not escaped and not in_class:
            depth += (character == "(") - (character == ")")
        if not escaped and character in "[]":
            in_class = character == "["
        if character == "|" and not (depth or in_class or escaped):
            found.append("")
        else:
            found[-1] += character
        escaped = character == "\\" and not escaped
    return found
