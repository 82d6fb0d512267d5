"""Structures that can't be: each with the field by which it is refused; empty where the transport refuses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from runahead.v1 import Choice, Structure


def _schema(schema: Any) -> Structure:
    return Structure(json_schema=schema if isinstance(schema, str) else json.dumps(schema))


def _deep(levels: int, kind: str) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}} if kind == "properties" else {kind: [schema]}
    return schema


_KEYWORDS: Final = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "additionalItems"),
    *("$dynamicRef", "$anchor", "contentEncoding", "nullable", "requird", "x-guidance"),
)

_SCHEMAS: Final[dict[str, tuple[Any, str]]] = {
    "no JSON": ("{", ""),
    "nothing in it": (" ", ""),
    "a list": ([1], ""),
    "a number": (5, ""),
    "a key twice": ('{"type":"null","type":"null"}', ""),
    "no number": ('{"minimum":NaN}', ""),
    "a number without end": ('{"minimum":1e999}', ""),
    "many digits": ('{"minimum":' + "9" * 100_000 + "}", ""),
    "half a character": ('{"const":"\\ud800"}', ""),
    "brackets": ("[" * 100_000, ""),
    "open objects": ('{"a":' * 20_000, ""),
    "deep": (_deep(60, "properties"), ""),
    "deep in lists": (_deep(60, "anyOf"), ""),
    "itself": ({"$ref": "#"}, ""),
    "itself by another": ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""),
    "nowhere": ({"$ref": "#/$defs/none"}, ""),
    "another file": ({"$ref": "https://example.com/schema.json"}, "#/$ref"),
    "no type": ({"type": "text"}, ""),
    "nothing valid": (False, ""),
    "no number between": ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
    "no length between": ({"type": "string", "minLength": 5, "maxLength": 3}, ""),
    "no value": ({"enum": []}, ""),
    "two types at once": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ""),
    "both of one": ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, ""),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, ""),
    "a group that is open": ({"properties": {"p": {"type": "string", "pattern": "("}}, "required": ["p"]}, ""),
    "no format": ({"type": "string", "format": "color"}, "#/format"),
    "more than is there": ({"type": "object", "required": ["a"], "additionalProperties": False}, ""),
    "very many names": ({"properties": {f"p{n}": {"type": "string"} for n in range(4800)}}, ""),
}

_EXPRESSIONS: Final = {
    "an open group": "(",
    "an open class": "[a",
    "nothing to repeat": "*",
    "a reference back": r"(a)\1",
    "what comes before": "(?<=a)b",
    "a range that is none": "[z-a]",
    "a repetition that is none": "a{3,1}",
    "groups in groups": "(" * 5_000 + "a" + ")" * 5_000,
    "what nothing matches": r"[^\x00-\x{10FFFF}]",
}

_GRAMMARS: Final = {
    "no rule": "",
    "no start": 'other: "a"',
    "an open text": 'start: "a',
    "a rule that is not there": "start: nowhere",
    "a rule of itself": "start: start",
    "a schema inside": 'start: %json {"not": {}}',
    "options of the library": '%llguidance {"no_forcing": true}\nstart: "a"',
    "a special token": "start: <|endoftext|>",
    "an attribute": 'start[max_tokens=3]: "a"',
    "brackets in brackets": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000,
    "very many ways": "start: " + " ".join(f'"{chr(97 + n % 26)}"?' for n in range(3000)),
    "states without number": "start: A\nA: " + " & ".join(f"/.*{chr(97 + n)}.{{{10 + n}}}/" for n in range(12)),
}

_OTHERS: Final[dict[str, tuple[Structure, str]]] = {
    "no structure": (Structure(), "structure"),
    "no object": (Structure(json_object=False), "structure.json_object"),
    "no choice": (Structure(choice=Choice()), "structure.choice.texts"),
    "an empty choice": (Structure(choice=Choice(texts=["a", ""])), "structure.choice.texts[1]"),
    "a large schema": (_schema(" " * (1 << 20)), "structure.json_schema"),
    "a large expression": (Structure(regex="a" * (1 << 20)), "structure.regex"),
    "a huge schema": (_schema(" " * (10 << 20)), ""),
}


def _all() -> Iterator[tuple[str, tuple[Structure, str]]]:
    for keyword in _KEYWORDS:
        inner = {"type": "object", "properties": {"a": {keyword: {}}}}
        yield f"the keyword {keyword}", (_schema(inner), f"structure.json_schema#/properties/a/{keyword}")
    for name, (schema, place) in _SCHEMAS.items():
        yield f"a schema: {name}", (_schema(schema), f"structure.json_schema{place}")
    for name, text in _EXPRESSIONS.items():
        yield f"an expression: {name}", (Structure(regex=text), "structure.regex")
    for name, text in _GRAMMARS.items():
        yield f"a grammar: {name}", (Structure(grammar=text), "structure.grammar")
    yield from _OTHERS.items()


BROKEN: Final = dict(_all())
