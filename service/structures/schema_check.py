"""A JSON Schema as one that is enforced whole: read within bounds, looked through keyword by keyword, and cleaned.

llguidance passes over keywords that it does not know. Here each is known: it is enforced, or it says nothing about what
is valid, or it is refused by its place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from runahead.service.structures.fault import StructureFault

Schema = dict[str, Any] | bool

# Keywords that are enforced. Behind them: what of schemas they hold.
_VALUE, _ONE, _LIST, _MAP = "no schema", "a schema", "a list of schemas", "schemas by names"
_ENFORCED: Final = {
    **dict.fromkeys(("type", "const", "enum", "$ref", "required", "format", "pattern", "multipleOf"), _VALUE),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _VALUE),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _VALUE),
    **dict.fromkeys(("items", "additionalProperties"), _ONE),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _LIST),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _MAP),
}
# What is about people, or tools, and is left out of the grammar. So are keys that begin with `x-`.
_SAID: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
)
_FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_BOUNDS: Final = ("exclusiveMinimum", "exclusiveMaximum")
_INWARDS: Final = 1e-9
_STRINGS: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SHOWN: Final = 60  # characters of a name that a sentence repeats


def read_schema(text: str, most_depth: int) -> Schema:
    """The schema that a text of JSON holds. Raises StructureFault."""
    if (depth := _depth(text)) > most_depth:
        raise StructureFault("", f"has {depth} lists and objects inside each other, and may have {most_depth}")
    try:
        schema = json.loads(
            text, object_pairs_hook=_object, parse_float=_number, parse_int=_whole, parse_constant=_number
        )
        text.encode()
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeError:
        raise StructureFault("", "has a character that no text may hold") from None
    except json.JSONDecodeError as error:
        raise StructureFault("", f"is no JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise StructureFault("", f"is no JSON that can be taken: {error}") from None
    if not isinstance(schema, dict | bool):
        raise StructureFault("#", "must be an object, or true")
    return schema


def enforced(schema: Schema, place: str = "#") -> Schema:
    """The schema without what says nothing about what is valid. Raises StructureFault for the first keyword that is not
    enforced, by its place."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise StructureFault(place, "must be a schema, an object or a boolean")
    clean: dict[str, Any] = {}
    for key, value in schema.items():
        inner = f"{place}/{pointer(key)}"
        if key in _SAID or (key.startswith("x-") and key != "x-guidance") or (key == "$id" and place == "#"):
            continue
        if key not in _ENFORCED:
            raise StructureFault(inner, "is a keyword that is not enforced")
        clean[key] = _part(key, value, inner)
    _check_format(clean, place)
    _check_least_properties(clean, place)
    if clean.get("type") != "integer":
        _draw_in(clean)
    return clean


def parts(schema: Schema, place: str = "#") -> Iterator[tuple[str, Schema]]:
    """A schema and all that are in it, each behind those that it holds, with their places."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            inner = f"{place}/{pointer(key)}"
            match _ENFORCED[key]:
                case "a schema":
                    yield from parts(value, inner)
                case "a list of schemas":
                    for index, one in enumerate(value):
                        yield from parts(one, f"{inner}/{index}")
                case "schemas by names":
                    for name, one in value.items():
                        yield from parts(one, f"{inner}/{pointer(name)}")
    yield place, schema


def pointer(name: str) -> str:
    """A name in a JSON pointer, shortened where it is long."""
    text = name.replace("~", "~0").replace("/", "~1")
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _part(key: str, value: Any, place: str) -> Any:
    """A keyword's value, cleaned where it holds schemas."""
    match _ENFORCED[key]:
        case "a schema":
            return enforced(value, place)
        case "a list of schemas":
            if not isinstance(value, list):
                raise StructureFault(place, "must be a list of schemas")
            return [enforced(one, f"{place}/{index}") for index, one in enumerate(value)]
        case "schemas by names":
            if not isinstance(value, dict):
                raise StructureFault(place, "must be an object of schemas")
            return {name: enforced(one, f"{place}/{pointer(name)}") for name, one in value.items()}
    if key == "$ref" and not (isinstance(value, str) and re.match(r"#(/|$)", value)):
        raise StructureFault(place, "must lead to a place in this schema: # or #/…")
    if key in _BOUNDS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise StructureFault(place, "must be a number")
    return value


def _check_format(schema: dict[str, Any], place: str) -> None:
    """Formats are enforced of strings alone."""
    if "format" not in schema:
        return
    if schema["format"] not in _FORMATS:
        raise StructureFault(f"{place}/format", f"is not enforced: formats are {', '.join(_FORMATS)}")
    if schema.get("type") != "string":
        raise StructureFault(f"{place}/format", "is enforced beside the type string alone")


def _check_least_properties(schema: dict[str, Any], place: str) -> None:
    """The library counts a name that stands twice as two. Names that are required can't."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len({str(name) for name in required}) + 1:
        raise StructureFault(f"{place}/minProperties", "is enforced for one more than are in required, and no more")


def _draw_in(schema: dict[str, Any]) -> None:
    """Exclusive bounds that are whole numbers, a billionth further in.

    llguidance 1.9.1 lets such a bound itself through where the other one is less than 1 away: 2 for 2 < x < 2.75. What
    is left out by this would be valid, and nothing that is let in is not.
    """
    for key, inwards in zip(_BOUNDS, (1, -1), strict=True):
        bound = schema.get(key)
        if bound is not None and float(bound).is_integer():
            schema[key] = bound + inwards * max(_INWARDS, 4 * math.ulp(bound))


def _depth(text: str) -> int:
    """How many lists and objects there are inside each other, if the text is JSON."""
    depth = most = 0
    for character in re.findall(r"[\[\]{}]", _STRINGS.sub("", text)):
        depth += 1 if character in "[{" else -1
        most = max(most, depth)
    return most


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {pointer(twice)} stands twice in an object")
    return made


def _whole(text: str) -> int:
    """Raises ValueError for one that no other number could be compared with."""
    _number(text)
    return int(text)


def _number(text: str) -> float:
    """Raises ValueError for what is no number in JSON, though Python reads it."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is no number that can be held")
    return number
