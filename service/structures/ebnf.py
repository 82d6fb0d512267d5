r"""Converts EBNF grammars of llama.cpp (GBNF) and XGrammar to Lark.

llguidance's converter copies literals and classes verbatim, though Lark and Rust's regular expressions read some
differently: `"\u0041BC"`, `[a&&b]`, `.`. So each character is first written in the one form that all read alike:
letters, digits and non-ASCII characters unchanged, others as `\xHH`.
"""

from __future__ import annotations

import re
from typing import Final

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from runahead.service.structures.fault import StructureFault

_HEAD: Final = "%llguidance {}"  # the converter's first line
_PARTS: Final = re.compile(r'#[^\n]*|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\.', re.DOTALL)
_CHARACTER: Final = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|([^\\])", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t"}
_ANY: Final = "[\\x00-\U0010ffff]"
_RULE: Final = re.compile(r"([\w-]+)[ \t]*::=")
_ALTERNATIVE_BELOW: Final = re.compile(r"([ \t]*\r?\n\s*)\|")


def lark_of(text: str, most_depth: int) -> str:
    """Convert a grammar for llguidance; the rule `root` becomes `start`.

    Every text that it allows is in the grammar. Since llguidance matches a rule without references greedily, it may not
    allow all of them: `[a-z]+` in such a rule leaves no letter for what follows. Raises StructureFault, with the line
    if known.
    """
    plain = _PARTS.sub(lambda part: _part(part, text), text)
    depth = 0
    for bracket in re.finditer(r"[()]", plain):  # literals and classes have none left
        depth += 1 if bracket[0] == "(" else -1
        if depth > most_depth:
            raise StructureFault(
                _line(plain, bracket.start()), f"has more than {most_depth} brackets inside each other"
            )
    known: set[str] = set()
    for rule in _RULE.finditer(plain):
        if rule[1] in known:
            raise StructureFault(_line(plain, rule.start()), f"has a second rule {rule[1]}")
        known.add(rule[1])
    try:
        # The converter rejects a `|` at a line's start: move it to the previous line.
        return str(gbnf_to_lark(_ALTERNATIVE_BELOW.sub(r" |\1", plain))).removeprefix(_HEAD).strip()
    except GbnfToLarkError as error:
        what = str(error).partition(" at line ")[0]
        raise StructureFault(_line(error.pos.text, error.pos.pos), f"can't be read as EBNF: {what}") from error
    except Exception as error:  # any class that the converter raises for inconsistent rules
        raise StructureFault("", f"can't be read as EBNF: {error}") from error


def _part(part: re.Match[str], text: str) -> str:
    """Rewrite a comment, literal, class or dot in the common form."""
    written, line = part[0], _line(text, part.start())
    if written.startswith("#"):
        return ""
    if written == ".":
        return _ANY
    inside = written[1:-1]
    if written.startswith('"'):
        return '"' + "".join(_plain(one) for one, _ in _characters(inside, line)) + '"'
    negated = inside.startswith("^")
    items = _characters(inside.removeprefix("^"), line)
    if not items:
        raise StructureFault(line, "has a class without a character")
    # A dash between two characters is a range; elsewhere, or escaped, it is a character.
    last = len(items) - 1
    made = [
        "-" if (one, is_escaped) == ("-", False) and 0 < location < last else _plain(one)
        for location, (one, is_escaped) in enumerate(items)
    ]
    return f"[{'^' if negated else ''}{''.join(made)}]"


def _characters(inside: str, line: str) -> list[tuple[str, bool]]:
    """Split into characters, each with whether it was escaped. Raises StructureFault."""
    found = []
    for each in _CHARACTER.finditer(inside):
        *codes, escaped, itself = each.groups()
        code = next((int(digits, 16) for digits in codes if digits), None)
        if itself is not None:
            found.append((itself, False))
        elif code is not None and code <= 0x10FFFF and not 0xD800 <= code < 0xE000:
            found.append((chr(code), True))
        elif escaped in _ESCAPED or (escaped and escaped.isascii() and not escaped.isalnum()):
            found.append((_ESCAPED.get(escaped, escaped), True))
        else:
            raise StructureFault(line, f"has the escape {each[0]}, which EBNF does not have")
    return found


def _plain(one: str) -> str:
    return one if one.isalnum() or one > "\x7f" else f"\\x{ord(one):02x}"


def _line(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}"
