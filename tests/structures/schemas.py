"""JSON Schemas from a seed: nested objects, arrays, enums, patterns, numbers with bounds, unicode, recursion.

They bound how long what fits may be, as far as a schema can, so that a model that draws at random comes to an end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("a", "name", "größe", "色", "naïve key", "x-y", "n0", 'with "quotes"', "émoji 🙂", "zeta")
_TEXTS = ("red", "grün", "青", "a b", "", 'say "hi"', "back\\slash", "🙂", "tab\there", "ß")
_PATTERNS = ("^[a-f]{2,5}$", "^(left|right)-[0-9]{1,3}$", "^[A-Z][a-z]{1,6}$", "^\\d{2}:\\d{2}$", "^[äöü]{1,3}$")
_DEPTH = 3


def schema_of(seed: int) -> Schema:
    """The schema of a seed. Seeds go through the kinds in turn."""
    return _KINDS[seed % len(_KINDS)](random.Random(seed), 0)


def _object(dice: random.Random, depth: int) -> Schema:
    names = dice.sample(_NAMES, dice.randrange(1, 4))
    required = [name for name in names if dice.random() < 0.6]
    return {
        "type": "object",
        "properties": {name: _any(dice, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(dice: random.Random, depth: int) -> Schema:
    least = dice.randrange(3)
    return {"type": "array", "items": _any(dice, depth + 1), "minItems": least, "maxItems": least + dice.randrange(3)}


def _tuple(dice: random.Random, depth: int) -> Schema:
    items = [_any(dice, depth + 1) for _ in range(dice.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _enum(dice: random.Random, depth: int) -> Schema:
    return {"enum": [*dice.sample(_TEXTS, dice.randrange(1, 5)), dice.choice((None, True, 7, -1.5))]}


def _const(dice: random.Random, depth: int) -> Schema:
    return {"const": dice.choice(({"k": [1, None]}, "ünï", 12, False, []))}


def _pattern(dice: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": dice.choice(_PATTERNS)}


def _string(dice: random.Random, depth: int) -> Schema:
    least = dice.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randrange(1, 6)}


def _integer(dice: random.Random, depth: int) -> Schema:
    least = dice.randrange(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + dice.randrange(0, 5000)}


def _number(dice: random.Random, depth: int) -> Schema:
    least = dice.randrange(-50, 50)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + dice.randrange(1, 90)}


def _choice(dice: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(dice, depth + 1) for _ in range(2)]}


def _plain(dice: random.Random, depth: int) -> Schema:
    return {"type": dice.choice(("boolean", "null"))}


def _recursive(dice: random.Random, depth: int) -> Schema:
    """A list or a tree, whose end is as likely as its going on."""
    if depth:
        return _enum(dice, depth)
    node = {
        "type": "object",
        "properties": {"value": _any(dice, _DEPTH), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


_LEAVES: tuple[Callable[[random.Random, int], Schema], ...] = (
    _enum, _pattern, _string, _integer, _number, _plain, _const,
)  # fmt: skip
_KINDS: tuple[Callable[[random.Random, int], Schema], ...] = (
    _object, _array, _enum, _pattern, _integer, _number, _recursive, _string, _tuple, _choice, _object, _const,
)  # fmt: skip


def _any(dice: random.Random, depth: int) -> Schema:
    return dice.choice(_LEAVES if depth >= _DEPTH else _KINDS)(dice, depth)
