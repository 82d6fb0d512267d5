"""Expands patterns of property names: `^(a|b)$` becomes properties `a` and `b`.

llguidance excludes names in `properties` from a pattern, and does not notice if none is left: it then allows a comma
that no name can follow.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import numpy as np
from llguidance import LLTokenizer

from runahead.runtime.grammar.matcher import GrammarError, new_matcher

_MOST_NAMES: Final = 32  # names of a pattern that are expanded
_LONGEST: Final = 64  # bytes of a quoted name


def spell_out_names(schema: dict[str, Any]) -> None:
    """Move patterns of few names to `properties`."""
    patterns = schema["patternProperties"]
    properties = dict(schema.get("properties", {}))
    declared = set(properties)
    if isinstance(schema.get("required"), list):
        declared.update(name for name in schema["required"] if isinstance(name, str))
    is_counted = "minProperties" in schema or "maxProperties" in schema
    for pattern, part in list(patterns.items()):
        names = _names_of(pattern)
        if names is None or (is_counted and not names <= declared):
            continue
        del patterns[pattern]
        for name in sorted(names):
            properties[name] = {"allOf": [properties[name], part]} if name in properties else part
    if properties:
        schema["properties"] = properties
    if not patterns:
        del schema["patternProperties"]


@cache
def _bytes() -> LLTokenizer:
    """Make a vocabulary in which each byte is a token."""
    return LLTokenizer("byte")


def _names_of(pattern: str) -> set[str] | None:
    """Return the names that a pattern matches, None if they are too many or the library can't parse it."""
    if "^" not in pattern or "$" not in pattern:
        return None
    grammar = {
        "json_schema": {"type": "string", "pattern": pattern, "x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}}
    }
    try:
        waiting = [(b"", new_matcher(_bytes(), json.dumps({"grammars": [grammar]})))]
    except GrammarError:
        return None
    names: set[str] = set()
    while waiting:
        text, matcher = waiting.pop()
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
        if matcher.is_error() or len(text) > _LONGEST:
            return None
        if matcher.is_accepting():
            names.add(json.loads(text))
            if len(names) > _MOST_NAMES:
                return None
            continue
        for byte in np.flatnonzero(mask).tolist():
            after = matcher.deep_copy()
            after.consume_token(byte)
            waiting.append((text + bytes([byte]), after))
    return names
