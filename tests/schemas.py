"""Two hundred JSON Schemas of many kinds, whose texts are short enough to end: made by rule, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

Schema = dict[str, Any]

_WORDS: Final = ("id", "name", "größe", "ключ", "名前", "a b", 'q"uote', "x/y", "tab\t", "n0")
_TEXTS: Final = (
    "",
    "a",
    "no",
    'say "hi"',
    "back\\slash",
    "über",
    "да",
    "日本語",
    "😀!",
    "line\nbreak",
    "tab\t",
    "{}[]",
)
_PATTERNS: Final = (
    "^[a-z]{2,4}$",
    "^(yes|no)$",
    "^[0-9]{3}-[0-9]{2}$",
    "^\\d\\d?$",
    '^[^a-z"\\\\]{1,3}$',
    "^x*y$",
    "^(ab|cd){1,2}$",
    "^[а-я]{2}$",
    "^[A-Z][a-z]{0,3}( [A-Z])?$",
    "^(#[0-9a-f]{3}|none)$",
)


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-200, 200)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if rng.random() < 0.3:
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 99)}
    if rng.random() < 0.2:
        schema = {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": rng.choice((2, 3, 7, 10))}
    return schema


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-40, 40) / 4
    bounds = ("exclusiveMinimum", "exclusiveMaximum") if rng.random() < 0.3 else ("minimum", "maximum")
    return {"type": "number", bounds[0]: low, bounds[1]: low + rng.randint(1, 60) / 4}


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(("date", "time", "uuid", "ipv4"))}


def _enum(rng: random.Random) -> Schema:
    values: list[Any] = [*rng.sample(_TEXTS, 3), rng.randint(-9, 99), None, True, [1, "a"], {"k": [None]}]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice((rng.choice(_TEXTS), 2.5, {"a": [1, {"b": None}]}, [[], {}], -7, False))}


def _plain(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


def _types(rng: random.Random) -> Schema:
    return {"type": ["null", "boolean"]} if rng.random() < 0.5 else {"anyOf": [_integer(rng), _string(rng), _enum(rng)]}


_LEAVES: Final = (_integer, _number, _string, _pattern, _format, _enum, _const, _plain, _types)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice(_LEAVES)(rng)


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"type": "array", "prefixItems": [_any(rng, depth - 1) for _ in range(2)], "items": False, "minItems": 2}
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _any(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.4:
        return _leaf(rng)
    return _array(rng, depth) if rng.random() < 0.4 else _object(rng, depth)


def _nested(rng: random.Random) -> Schema:
    return _object(rng, 4)


def _more(rng: random.Random) -> Schema:
    """Objects with names that are not known beforehand."""
    if rng.random() < 0.5:
        leaves = {"^n[0-9]$": _integer(rng), "^t_[a-c]$": _enum(rng)}
        return {"type": "object", "patternProperties": leaves, "additionalProperties": False, "maxProperties": 3}
    return {
        "type": "object",
        "properties": {"known": _leaf(rng)},
        "required": ["known"],
        "patternProperties": {"^x[0-9]$": _plain(rng)},
        "additionalProperties": False,
        "maxProperties": 2,
    }


def _all_of(rng: random.Random) -> Schema:
    parts = [{"properties": {name: _leaf(rng)}, "required": [name]} for name in ("left", "right")]
    return {"type": "object", "allOf": parts, "additionalProperties": True, "maxProperties": 2}


def _one_of(rng: random.Random) -> Schema:
    def kind(name: str) -> Schema:
        properties = {"kind": {"const": name}, "value": _leaf(rng)}
        return {
            "type": "object",
            "properties": properties,
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    return {"oneOf": [kind("a"), kind("b"), kind("日")]}


def _list(rng: random.Random) -> Schema:
    """A list by references, which may end after each item."""
    more = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    properties = {"value": _plain(rng), "next": more}
    node = {"type": "object", "properties": properties, "required": ["value", "next"], "additionalProperties": False}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _tree(rng: random.Random) -> Schema:
    """A tree that leads to itself as a whole."""
    properties = {"v": _integer(rng), "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}
    return {"type": "object", "properties": properties, "required": ["v", "c"], "additionalProperties": False}


def _shared(rng: random.Random) -> Schema:
    properties = {"a": {"$ref": "#/$defs/leaf"}, "b": {"$ref": "#/$defs/leaf"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    return {"$defs": {"leaf": _leaf(rng)}, **schema}


_KINDS: Final[tuple[tuple[Callable[[random.Random], Schema], int], ...]] = (
    *((leaf, 8) for leaf in _LEAVES),
    (lambda rng: _array(rng, 2), 24),
    (lambda rng: _object(rng, 1), 24),
    (_nested, 30),
    (_more, 10),
    (_all_of, 8),
    (_one_of, 8),
    (_list, 8),
    (_tree, 8),
    (_shared, 8),
)


def _made() -> list[Schema]:
    rng = random.Random(13)
    return [kind(rng) for kind, count in _KINDS for _ in range(count)]


SCHEMAS: Final = _made()
