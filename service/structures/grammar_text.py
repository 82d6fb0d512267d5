"""Converts a request's structure to a grammar in llguidance's JSON, which the engine gets.

EBNF of llama.cpp (GBNF) and XGrammar becomes Lark. llguidance's converter copies literals and classes verbatim, though
Lark and Rust's regular expressions read some differently: `"\\u0041BC"`, `[a&&b]`, `.`. So each character is first
written in the one form that all read alike: letters, digits and non-ASCII characters unchanged, others as `\\xHH`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from runahead.runtime.wire.parameters import MAX_STRUCTURE
from runahead.service.structures.compile_messages import StructureFault
from runahead.service.structures.schema_check import Schema, enforced, parts, read_schema

# Strings, comments and regular expressions, which are skipped.
_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')
_REFUSED: Final = (
    (re.compile(r"%(?!(?:ignore|import)\b)\w*"), "a directive other than %ignore and %import"),
    (re.compile(r"<[^\s<>]*>?"), "a special token, which has no text"),
    (re.compile(r"@\w+"), "another grammar"),
    (re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(?:\.\d+)?[ \t]*\[", re.MULTILINE), "an attribute of a rule"),
)

_HEAD: Final = "%llguidance {}"  # the converter's first line
_PARTS: Final = re.compile(r'#[^\n]*|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\.', re.DOTALL)
_CHARACTER: Final = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|([^\\])", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t"}
_ANY: Final = "[\\x00-\U0010ffff]"
_RULE: Final = re.compile(r"([\w-]+)[ \t]*::=")
_ALTERNATIVE_BELOW: Final = re.compile(r"([ \t]*\r?\n\s*)\|")

_HOW: Final = {
    # Enough white space for readable text, bounded: a model that begins to write spaces may never stop.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}",
    # One spelling for each character: the library would take "\u0061" for another name than "a".
    "json_allowed_escapes": 'nrbtf\\"',
}
_DELETE: Final = "\x7f"  # Lark requires an escape, JSON does not


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


def grammar_text(kind: str, text: str, most_depth: int) -> tuple[str, Schema | None]:
    """Make a structure's grammar, and the cleaned schema if it is one. Raises StructureFault.

    kind, text: of `runahead.service.contract.inputs.StructureSource`. most_depth: of lists, objects and brackets.
    """
    schema: Schema | None = None
    if kind == "json_schema":
        schema = enforced(read_schema(text, most_depth))
        grammar = of_schema(schema)
    elif kind == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    elif kind == "choice":
        grammar = _of({"lark_grammar": "start: " + " | ".join(map(_literal, json.loads(text)))})
    else:
        if kind == "ebnf":
            text = lark_of(text, most_depth)
        check_lark(text, most_depth)
        grammar = _of({"lark_grammar": text})
    if len(grammar) > MAX_STRUCTURE:
        raise StructureFault("", f"makes a grammar of {len(grammar)} characters, and one may have {MAX_STRUCTURE}")
    return grammar, schema


def of_schema(schema: Schema) -> str:
    """Make the grammar of a fully enforced schema, with formatting rules for its texts."""
    outer: dict[str, Any] = {} if schema is True else schema if isinstance(schema, dict) else {"anyOf": []}
    how: dict[str, Any] = dict(_HOW)
    if any(isinstance(part, dict) and "oneOf" in part for _, part in parts(schema)):
        how["coerce_one_of"] = True  # as anyOf: its branches exclude each other, see `check_one_of`
    return _of({"json_schema": {"x-guidance": how, **outer}})


def _of(grammar: dict[str, Any]) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False, separators=(",", ":"))


def _literal(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False).replace(_DELETE, "\\u007f")
