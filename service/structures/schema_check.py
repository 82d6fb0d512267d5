"""Reads a JSON Schema, checks that every keyword is enforced, and cleans it.

llguidance ignores unknown keywords. Here each keyword is enforced, is an annotation without effect, or is refused with
its location. Formats that llguidance enforces too loosely become exact or stricter regular expressions. Patterns of
property names are expanded: `^(a|b)$` becomes properties `a` and `b`, because llguidance excludes names in `properties`
from a pattern and does not notice if none is left: it then allows a comma that no name can follow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from llguidance import LLTokenizer

from runahead.runtime.grammar.matcher import GrammarError, new_matcher
from runahead.service.structures.compile_messages import StructureFault
from runahead.service.structures.schema_numbers import INTEGER_FORMATS, draw_in, exact_value, integers_of
from runahead.service.structures.schema_unions import add_null, check_discriminator, check_multiples, check_one_of

_MOST_NAMES: Final = 32  # names of a pattern that are expanded
_LONGEST: Final = 64  # bytes of a quoted name

# RFC 3339, years 0001 to 9999. A leap second is 23:59:60 UTC, in a date-time only at the end of June or December.
_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOURS: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOURS}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOURS})"
_LEAP_SECOND: Final = r"23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00)"
# RFC 1123 and RFC 5890: hyphens in positions 3 and 4 are reserved; `xn--` labels are not decoded.
_LABEL: Final = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL})*"

# A regular expression and the maximum length in characters. Email addresses stay with the library: RFC 5321's lengths
# are minimums for software.
_EXACT: Final[dict[str, tuple[str, int | None]]] = {
    "date": (f"^{_DATE}$", None),
    "time": (f"^(?:{_TIME}|{_LEAP_SECOND})$", None),
    "date-time": (f"^(?:{_DATE}[tT]{_TIME}|{_YEAR}-(?:06-30|12-31)[tT]{_LEAP_SECOND})$", None),
    "hostname": (f"^{_HOST}$", 253),
}

Schema = dict[str, Any] | bool

# Enforced keywords, with the kind of schemas in their values.
_VALUE, _ONE, _LIST, _MAP = "no schema", "a schema", "a list of schemas", "schemas by names"
_ENFORCED: Final = {
    **dict.fromkeys(("type", "const", "enum", "$ref", "required", "format", "pattern", "multipleOf"), _VALUE),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _VALUE),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _VALUE),
    **dict.fromkeys(("items", "additionalProperties"), _ONE),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _LIST),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _MAP),
}
# Annotations, which are left out of the grammar, like keys that begin with `x-`.
_SAID: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
)
_FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_STRINGS: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SHOWN: Final = 60  # characters of a name in a sentence


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


def replace_format(schema: dict[str, Any]) -> None:
    """Replace a format by its regular expression, besides the schema's other keywords."""
    if schema["format"] not in _EXACT:
        return
    expression, longest = _EXACT[schema.pop("format")]
    condition: dict[str, Any] = {"type": "string", "pattern": expression}
    if longest is not None:
        condition["maxLength"] = longest
    schema["allOf"] = [*schema.get("allOf", []), condition]


def read_schema(text: str, most_depth: int) -> Schema:
    """Parse a JSON text as a schema. Raises StructureFault."""
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


def enforced(schema: Schema, location: str = "#", root: Schema | None = None) -> Schema:
    """Return the schema without annotations. Raises StructureFault for the first keyword that is not enforced.

    root: the whole schema, if this is a part of it.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise StructureFault(location, "must be a schema, an object or a boolean")
    root = schema if root is None else root
    clean: dict[str, Any] = {}
    for key, value in schema.items():
        inner = f"{location}/{pointer(key)}"
        if _says_nothing(key, value, location):
            continue
        if key not in _ENFORCED:
            raise StructureFault(inner, "is a keyword that is not enforced")
        clean[key] = _part(key, value, inner, root)
    if "oneOf" in clean:
        check_one_of(schema, location, root)
    if "discriminator" in schema:
        check_discriminator(schema, location, root)
    check_multiples(schema, location, root)
    _check_format(clean, location)
    _check_least_properties(clean, location)
    draw_in(clean, location)
    if "patternProperties" in clean:
        spell_out_names(clean)
    return add_null(clean) if schema.get("nullable") is True else clean


def _says_nothing(key: str, value: Any, location: str) -> bool:
    """Whether to skip the keyword: an annotation, turned off, or handled by `enforced`."""
    if key == "uniqueItems":
        return value is False
    if key == "nullable":
        return isinstance(value, bool)
    is_vendors = key.startswith("x-") and key != "x-guidance"
    return key in _SAID or key == "discriminator" or is_vendors or (key == "$id" and location == "#")


def parts(schema: Schema, location: str = "#") -> Iterator[tuple[str, Schema]]:
    """Yield all schemas in a schema, inner ones first, with their locations."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            inner = f"{location}/{pointer(key)}"
            match _ENFORCED[key]:
                case "a schema":
                    yield from parts(value, inner)
                case "a list of schemas":
                    for index, one in enumerate(value):
                        yield from parts(one, f"{inner}/{index}")
                case "schemas by names":
                    for name, one in value.items():
                        yield from parts(one, f"{inner}/{pointer(name)}")
    yield location, schema


def pointer(name: str) -> str:
    """Escape a name for a JSON pointer and shorten it."""
    text = name.replace("~", "~0").replace("/", "~1")
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _part(key: str, value: Any, location: str, root: Schema) -> Any:
    """Clean a keyword's value if it holds schemas."""
    match _ENFORCED[key]:
        case "a schema":
            return enforced(value, location, root)
        case "a list of schemas":
            if not isinstance(value, list):
                raise StructureFault(location, "must be a list of schemas")
            return [enforced(one, f"{location}/{index}", root) for index, one in enumerate(value)]
        case "schemas by names":
            if not isinstance(value, dict):
                raise StructureFault(location, "must be an object of schemas")
            return {name: enforced(one, f"{location}/{pointer(name)}", root) for name, one in value.items()}
    if key == "$ref" and not (isinstance(value, str) and re.match(r"#(/|$)", value)):
        raise StructureFault(location, "must lead to a place in this schema: # or #/…")
    return exact_value(value, location) if key in ("const", "enum") else value


def _check_format(schema: dict[str, Any], location: str) -> None:
    """Check that the format applies to strings or integers, for which formats are enforced."""
    if "format" not in schema:
        return
    name = schema["format"]
    if name not in (*_FORMATS, *INTEGER_FORMATS):
        raise StructureFault(
            f"{location}/format", f"is not enforced: formats are {', '.join((*_FORMATS, *INTEGER_FORMATS))}"
        )
    of_type = "integer" if name in INTEGER_FORMATS else "string"
    if schema.get("type") != of_type:
        raise StructureFault(f"{location}/format", f"{name} is enforced beside the type {of_type} alone")
    if of_type == "integer":
        schema["allOf"] = [*schema.get("allOf", []), integers_of(schema.pop("format"))]
    else:
        replace_format(schema)


def _check_least_properties(schema: dict[str, Any], location: str) -> None:
    """Check minProperties: the library counts a repeated name twice, which can't happen to required names."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len({str(name) for name in required}) + 1:
        raise StructureFault(f"{location}/minProperties", "is enforced for one more than are in required, and no more")


def _depth(text: str) -> int:
    """Return the nesting depth of lists and objects, if the text is JSON."""
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
    """Parse an integer. Raises ValueError if it is too large to compare."""
    _number(text)
    return int(text)


def _number(text: str) -> float:
    """Parse a number. Raises ValueError for Python's extensions of JSON."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number of 64 bits")
    return number
