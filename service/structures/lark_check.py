"""Checks a Lark grammar for features that are not enforced or invisible in a text."""

from __future__ import annotations

import re
from typing import Final

from runahead.service.structures.fault import StructureFault

# Strings, comments and regular expressions, which are skipped.
_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')
_REFUSED: Final = (
    (re.compile(r"%(?!(?:ignore|import)\b)\w*"), "a directive other than %ignore and %import"),
    (re.compile(r"<[^\s<>]*>?"), "a special token, which has no text"),
    (re.compile(r"@\w+"), "another grammar"),
    (re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(?:\.\d+)?[ \t]*\[", re.MULTILINE), "an attribute of a rule"),
)


def check_lark(text: str, most_depth: int) -> None:
    """Check a grammar. Raises StructureFault for keywords outside the contract's list."""
    words = _QUOTED.sub(lambda found: " " * len(found[0]), text)
    for refused, what in _REFUSED:
        if found := refused.search(words):
            raise StructureFault(_line(text, found.start()), f"has {what}, which is not supported")
    depth = 0
    for bracket in re.finditer(r"[()\[\]]", words):
        depth += 1 if bracket[0] in "([" else -1
        if depth > most_depth:
            raise StructureFault(_line(text, bracket.start()), f"has more than {most_depth} brackets inside each other")


def _line(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}"
