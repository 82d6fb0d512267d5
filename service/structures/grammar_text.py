"""Converts a request's structure to a grammar in llguidance's JSON, which the engine gets."""

from __future__ import annotations

import json
from typing import Any, Final

from llguidance import LLMatcher

from runahead.runtime.wire.parameters import MAX_STRUCTURE
from runahead.service.structures.ebnf import lark_of
from runahead.service.structures.fault import StructureFault
from runahead.service.structures.lark_check import check_lark
from runahead.service.structures.schema_check import Schema, enforced, parts, read_schema

_HOW: Final = {
    # Enough white space for readable text, bounded: a model that begins to write spaces may never stop.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}",
    # One spelling for each character: the library would take "\u0061" for another name than "a".
    "json_allowed_escapes": 'nrbtf\\"',
}
_DELETE: Final = "\x7f"  # Lark requires an escape, JSON does not


def grammar_text(kind: str, text: str, most_depth: int) -> tuple[str, Schema | None]:
    """Make a structure's grammar, and the cleaned schema if it is one. Raises StructureFault.

    kind, text: of `runahead.service.contract.structure.StructureSource`. most_depth: of lists, objects and brackets.
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
