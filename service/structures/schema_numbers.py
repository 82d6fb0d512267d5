"""Adjusts a schema's numbers so that llguidance never enforces looser bounds.

The library stores numbers as float64 and writes them exactly or with the shortest digits: 2^62 + 1 becomes
4611686018427387904 or 4611686018427388000. So a bound beyond 2^53 moves inwards to the next float64 that is inside in
both forms, and a constant that would change is refused. The library also reads a fraction of more than 15 digits as a
neighbor of the nearest float64: such a bound is rounded inwards, and such a constant is refused.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final

from runahead.service.structures.compile_messages import StructureFault

INTEGER_FORMATS: Final = {"int32": 32, "int64": 64}  # bits

_EXACT: Final = 2**53  # float64 is exact below it
_MOST: Final = 2**63 - 1024  # the largest float64 in 64 bits, which the library formats
_ONE_SIDED: Final = 10**18  # the library's one-sided ranges end here
_BOUNDS: Final = {
    "minimum": ("minimum", 1, False),
    "maximum": ("maximum", -1, False),
    "exclusiveMinimum": ("minimum", 1, True),
    "exclusiveMaximum": ("maximum", -1, True),
}
_INWARDS: Final = 1e-9


def exact_value(value: Any, location: str) -> Any:
    """Return a value of `const` or `enum` that the library keeps exactly. Raises StructureFault for any other."""
    if isinstance(value, list):
        return [exact_value(one, location) for one in value]
    if isinstance(value, dict):
        return {name: exact_value(one, location) for name, one in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and not value.is_integer():
        is_exact = _rounded(value, 1) == value
    else:
        value = int(value)
        is_exact = abs(value) <= _MOST and int(float(value)) == value
    if not is_exact:
        raise StructureFault(location, f"has the number {value}, which is too long to be enforced as it is written")
    return value


def integers_of(integer_format: str) -> dict[str, Any]:
    """Return the schema of an integer format."""
    size = 2 ** (INTEGER_FORMATS[integer_format] - 1)
    schema: dict[str, Any] = {"type": "integer", "minimum": -size, "maximum": size - 1}
    draw_in(schema, "#")
    return schema


def draw_in(schema: dict[str, Any], location: str) -> None:
    """Move bounds inwards that the library would not enforce exactly. Raises StructureFault if no bound can be
    enforced.
    """
    is_integer = schema.get("type") == "integer"
    before = {key: schema[key] for key in _BOUNDS if key in schema}
    for key, bound in before.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise StructureFault(f"{location}/{key}", "must be a number")
        target, inwards, is_exclusive = _BOUNDS[key]
        if abs(bound) < _EXACT:
            if is_exclusive and not is_integer and float(bound).is_integer():
                # For 2 < x < 2.75 the library accepts 2 itself.
                schema[key] = bound + inwards * max(_INWARDS, 4 * math.ulp(bound))
            elif isinstance(bound, float):
                schema[key] = _rounded(bound, inwards)
            continue
        inner = _inner(bound, inwards, is_exclusive=is_exclusive, is_integer=is_integer)
        if inwards * inner > _MOST:
            raise StructureFault(f"{location}/{key}", f"is not enforced beyond ±{_MOST}")
        del schema[key]
        if target in schema:
            inner = max(schema[target], inner) if inwards > 0 else min(schema[target], inner)
        schema[target] = inner
    if schema.get("minimum", 0) >= _ONE_SIDED:
        schema.setdefault("maximum", _MOST)
    if schema.get("maximum", 0) <= -_ONE_SIDED:
        schema.setdefault("minimum", -_MOST)
    if _is_empty(schema) and not _is_empty(before):
        raise StructureFault(location, "has bounds that leave no number which is enforced exactly")


def _inner(bound: float, inwards: int, *, is_exclusive: bool, is_integer: bool) -> int:
    """Return the next float64 inside a bound, in its exact value and in the library's digits."""
    if is_integer and inwards < 0 and bound - is_exclusive >= 2**63 - 1:
        return 2**63 - 1  # the library reads it as 2^63 and clamps it to int64's maximum
    value = float(bound)
    if inwards * value < 0:
        value = math.copysign(min(abs(value), _MOST), value)
    while any(inwards * (whole - int(bound)) < is_exclusive for whole in (int(value), int(Decimal(repr(value))))):
        value = math.nextafter(value, inwards * math.inf)
    return int(value)


def _rounded(value: float, inwards: int) -> float:
    """Round inwards to a number that the library reads exactly: 15 digits, the last at the 22nd decimal or before."""
    rounding = ROUND_CEILING if inwards > 0 else ROUND_FLOOR
    digits = Context(prec=15, rounding=rounding).create_decimal(repr(value))
    return float(digits.quantize(Decimal("1e-22"), context=Context(prec=50, rounding=rounding)))


def _is_empty(schema: dict[str, Any]) -> bool:
    least = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    most = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    return bool(least and most) and max(least) > min(most)
