"""Checks `oneOf`, `allOf` and discriminators: whether branches exclude each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations
from math import prod
from typing import Any, Final
from urllib.parse import unquote

from runahead.service.structures.compile_messages import StructureFault

_KINDS: Final = {"number": ("integer", "fraction")}  # an integer is also a number
_UNIONS: Final = ("anyOf", "oneOf")
_DEEPEST: Final = 8  # nesting of properties and references that is examined
_MOST_MULTIPLE: Final = 2**32  # beyond it the library's least common multiple overflows


def check_one_of(schema: dict[str, Any], location: str, root: Any) -> None:
    """Check `oneOf`, which the library enforces like `anyOf`. Raises StructureFault unless the branches provably
    exclude each other.
    """
    if any(not _exclude(one, other, root, 0) for one, other in combinations(schema["oneOf"], 2)):
        raise StructureFault(
            f"{location}/oneOf",
            "is enforced where the types, the constants or the required properties of its branches exclude each other; "
            "anyOf is always enforced",
        )


def check_discriminator(schema: dict[str, Any], location: str, root: Any) -> None:
    """Check a discriminator. Raises StructureFault if it adds anything to the branches."""
    name = schema["discriminator"].get("propertyName") if isinstance(schema["discriminator"], dict) else None
    branches = schema.get("oneOf", schema.get("anyOf"))
    if isinstance(branches, list) and all(_tells(branch, name, root) for branch in branches):
        return
    raise StructureFault(
        f"{location}/discriminator",
        "is taken beside oneOf or anyOf whose branches each require its property and have a constant for it",
    )


def check_multiples(schema: dict[str, Any], location: str, root: Any) -> None:
    """Check combined `multipleOf`. Raises StructureFault if the library can't hold the common multiple."""
    if not schema.keys() & {"$ref", "allOf", *_UNIONS}:
        return
    multiples = {Decimal(str(multiple)) for multiple in _multiples(schema, root, 0)}
    places = min((int(multiple.as_tuple().exponent) for multiple in multiples), default=0)
    if len(multiples) > 1 and prod(int(multiple.scaleb(-min(places, 0))) for multiple in multiples) >= _MOST_MULTIPLE:
        raise StructureFault(location, "combines values of multipleOf whose product is too large to be enforced")


def add_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Add null to a schema, like `nullable` of OpenAPI."""
    definitions = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        if "const" in schema:
            schema["enum"] = [schema.pop("const")]
        if isinstance(schema.get("enum"), list):
            schema["enum"] = [*schema["enum"], None]
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            schema["type"] = [*types, *({"null"} - set(types))]
        return schema | definitions
    return {"anyOf": [schema, {"type": "null"}]} | definitions


def _exclude(one: Any, other: Any, root: Any, depth: int) -> bool:
    """Whether the schemas provably exclude each other."""
    if depth > _DEEPEST:
        return False
    for a in _conditions(one, root, depth):
        for b in _conditions(other, root, depth):
            if a is False or b is False:
                return True
            if isinstance(a, dict) and isinstance(b, dict) and _exclude_directly(a, b, root, depth):
                return True
    return False


def _exclude_directly(a: dict[str, Any], b: dict[str, Any], root: Any, depth: int) -> bool:
    ours, theirs = _constants(a), _constants(b)
    if ours is not None and theirs is not None and not ours & theirs:
        return True
    if not _kinds(a) & _kinds(b):
        return True
    if any(_branches_exclude(one, other, root, depth) for one, other in ((a, b), (b, a))):
        return True
    if _kinds(a) & _kinds(b) != {"object"}:
        return False
    mine, other = a.get("properties"), b.get("properties")
    if not isinstance(mine, dict) or not isinstance(other, dict):
        return False
    required = {name for one in (a, b) for name in one.get("required", []) if isinstance(name, str)}
    return any(
        name in mine and name in other and _exclude(mine[name], other[name], root, depth + 1) for name in required
    )


def _multiples(schema: Any, root: Any, depth: int) -> Iterator[float]:
    """Yield the values of `multipleOf` in a schema, in those combined with it, and in their branches."""
    for condition in _conditions(schema, root, depth):
        if not isinstance(condition, dict):
            continue
        multiple = condition.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            yield multiple
        for key in _UNIONS:
            if isinstance(branches := condition.get(key), list) and depth < _DEEPEST:
                for branch in branches:
                    yield from _multiples(branch, root, depth + 1)


def _branches_exclude(union: dict[str, Any], other: dict[str, Any], root: Any, depth: int) -> bool:
    return any(
        isinstance(union.get(key), list) and all(_exclude(branch, other, root, depth + 1) for branch in union[key])
        for key in _UNIONS
    )


def _conditions(schema: Any, root: Any, depth: int) -> Iterator[Any]:
    """Yield schemas that a value must all match: this one, its reference's and its `allOf`."""
    if isinstance(schema, dict) and schema.get("nullable") is True:
        schema = add_null({key: value for key, value in schema.items() if key != "nullable"})
    yield schema
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _conditions(_resolved(reference, root), root, depth + 1)
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            yield from _conditions(part, root, depth + 1)


def _resolved(reference: str, root: Any) -> Any:
    """Resolve a reference; True, which allows everything, if it leads nowhere."""
    found = root
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found


def _tells(branch: Any, name: Any, root: Any) -> bool:
    """Whether the branch requires the property and restricts it to constants."""
    conditions = [one for one in _conditions(branch, root, 0) if isinstance(one, dict)]
    values = [one["properties"].get(name) for one in conditions if isinstance(one.get("properties"), dict)]
    has_constant = any(isinstance(value, dict) and _constants(value) is not None for value in values)
    return has_constant and any(name in one.get("required", []) for one in conditions)


def _constants(schema: dict[str, Any]) -> set[str] | None:
    """Return the values of `const` and `enum` as canonical texts, None without either."""
    if "const" in schema:
        return {_canonical(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return set(map(_canonical, schema["enum"]))
    return None


def _canonical(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_canonical(one)}" for name, one in sorted(value.items())) + "}"
    return json.dumps(value)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the types that a value may have by `type`, `const` and `enum`."""
    types = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    names = types if isinstance(types, list) else [types]
    kinds = {kind for name in names for kind in _KINDS.get(name, (name,))}
    if "const" in schema:
        kinds &= {_kind_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        kinds &= set(map(_kind_of, schema["enum"]))
    return kinds


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if float(value).is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
