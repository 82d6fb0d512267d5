"""Where a text may be cut without another token: what a tokenizer's own description says about it, and nothing guessed.

A tokenizer of the byte-level kind first cuts a text by a regular expression, and no token spans two of the pieces. So a
text may be cut between two of them, if the expression finds the same pieces on each side of the cut as in the whole.
For the place between a letter and the space of a next word, that can be said of every expression that is put together
of the alternatives below: none matches a letter and a space behind it; none looks further than the character behind its
match; letters up to the cut are matched to the last of them, whether the text goes on or not; and none looks back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

PIECE: Final = 8192  # characters of a piece, about: some 10 ms of work
LONG: Final = 4 * PIECE  # characters; a piece that is longer is one in which no place for a cut was found

# Between the letter that is found and the space behind it.
_PLACE: Final = re.compile(r"[A-Za-z](?= [A-Za-z])")
# Of these, one has to be there that matches any letters.
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
# They look through all of a run of spaces for a line's end, and begin anew at each space where none is there. One of
# the second has to match the whole run, before `\s` matches a space of it.
_LOOK_THROUGH_SPACES: Final = frozenset({r"\s*[\r\n]+", r"\s*[\r\n]"})
_MATCH_SPACES: Final = frozenset({r"\s+(?!\S)", r"\s+"})


def can_be_cut(description: Mapping[str, Any]) -> bool:
    """Whether texts may be cut at the places of `cut_behind`. description: of a tokenizer, as `tokenizer.json` has it.

    False where it is not certain.
    """
    model, added = description["model"], description["added_tokens"]
    if model["type"] != "BPE" or model.get("dropout") or not _by_known_alternatives(description["pre_tokenizer"]):
        return False
    # Canonical composition joins no space and no letter behind one with what stands before.
    if description["normalizer"] is not None and description["normalizer"]["type"] != "NFC":
        return False
    # Added tokens are found in the text before anything else: none may span a cut, or take the space behind it.
    return not any(" " in token["content"] or (token["rstrip"] and token["content"][-1:].isalpha()) for token in added)


def is_quick(description: Mapping[str, Any]) -> bool:
    """Whether the time for a text is in proportion to its length, as far as regular expressions go: there is none but
    known ones, and none of these looks again and again through the same spaces. description: as `can_be_cut` has it."""
    parts = [description[name] for name in ("normalizer", "post_processor", "decoder")]
    pre_tokenizer = description["pre_tokenizer"]
    if not _by_known_alternatives(pre_tokenizer) or not _looks_once(_alternatives(_pattern(pre_tokenizer))):
        parts.append(pre_tokenizer)
    return not any(map(_has_expression, parts))


def cut_behind(text: str, start: int, most: int) -> int | None:
    """The first place for a cut that makes a piece of PIECE characters or more; the text's end, if it is not longer.

    start: of the piece. most: characters of it that are looked through. None: there is no place among them.
    """
    if len(text) - start <= PIECE:
        return len(text)
    found = _PLACE.search(text, start + PIECE - 1, min(len(text), start + most + 2))
    if found is not None:
        return found.end()
    return len(text) if len(text) - start <= most else None


def _by_known_alternatives(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return True  # the expression of GPT-2, all alternatives of which are known
    alternatives = set(_alternatives(_pattern(pre_tokenizer)))
    return bool(alternatives & _LETTERS) and alternatives <= _LETTERS | _OTHERS


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """The expression that cuts a text before a byte-level tokenizer; empty where there is none, or the library's."""
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


def _looks_once(alternatives: Sequence[str]) -> bool:
    if not _LOOK_THROUGH_SPACES.intersection(alternatives):
        return True
    places = [place for place, one in enumerate(alternatives) if one in _MATCH_SPACES]
    return bool(places) and r"\s" not in alternatives[: places[0]]


def _has_expression(part: Any) -> bool:
    if isinstance(part, Mapping):
        return "Regex" in part or any(map(_has_expression, part.values()))
    return isinstance(part, list) and any(map(_has_expression, part))


def _alternatives(pattern: str) -> list[str]:
    """Those of the whole expression: between the bars that stand in no brackets."""
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
