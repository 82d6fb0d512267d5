"""Numbers of a schema as llguidance enforces them, never wider than they are written.

The library holds each number as a float64, and writes it with its exact digits or with the fewest that read back as it:
2^62 + 1 becomes 4611686018427387904 or 4611686018427388000. So a bound beyond 2^53 is drawn in to the next float64 that
is inside either way, and a constant that would change is refused. The library also reads a fraction of more than 15
digits as a neighbor of the nearest float64: such a bound is rounded inwards, and such a constant is refused.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final

from runahead.service.structures.fault import StructureFault

INTEGER_FORMATS: Final = {"int32": 32, "int64": 64}  # bits

_EXACT: Final = 2**53  # below it a float64 is what was written
_MOST: Final = 2**63 - 1024  # the largest float64 in 64 bits, of which the library makes digits
_ONE_SIDED: Final = 10**18  # a range of the library's that begins there has an end, too
_BOUNDS: Final = {
    "minimum": ("minimum", 1, False),
    "maximum": ("maximum", -1, False),
    "exclusiveMinimum": ("minimum", 1, True),
    "exclusiveMaximum": ("maximum", -1, True),
}
_INWARDS: Final = 1e-9


def exact_value(value: Any, place: str) -> Any:
    """A value of `const` or `enum` that the library writes as it is. Raises StructureFault for one that it changes."""
    if isinstance(value, list):
        return [exact_value(one, place) for one in value]
    if isinstance(value, dict):
        return {name: exact_value(one, place) for name, one in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and not value.is_integer():
        is_exact = _rounded(value, 1) == value
    else:
        value = int(value)
        is_exact = abs(value) <= _MOST and int(float(value)) == value
    if not is_exact:
        raise StructureFault(place, f"has the number {value}, which is too long to be enforced as it is written")
    return value


def integers_of(integer_format: str) -> dict[str, Any]:
    """The schema of the integers of a format."""
    size = 2 ** (INTEGER_FORMATS[integer_format] - 1)
    schema: dict[str, Any] = {"type": "integer", "minimum": -size, "maximum": size - 1}
    draw_in(schema, "#")
    return schema


def draw_in(schema: dict[str, Any], place: str) -> None:
    """Draws in the bounds that the library would not enforce. Raises StructureFault where none is left to enforce."""
    is_integer = schema.get("type") == "integer"
    before = {key: schema[key] for key in _BOUNDS if key in schema}
    for key, bound in before.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise StructureFault(f"{place}/{key}", "must be a number")
        target, inwards, is_exclusive = _BOUNDS[key]
        if abs(bound) < _EXACT:
            if is_exclusive and not is_integer and float(bound).is_integer():
                # Of 2 < x < 2.75 the library lets 2 itself through.
                schema[key] = bound + inwards * max(_INWARDS, 4 * math.ulp(bound))
            elif isinstance(bound, float):
                schema[key] = _rounded(bound, inwards)
            continue
        inner = _inner(bound, inwards, is_exclusive=is_exclusive, is_integer=is_integer)
        if inwards * inner > _MOST:
            raise StructureFault(f"{place}/{key}", f"is not enforced beyond ±{_MOST}")
        del schema[key]
        if target in schema:
            inner = max(schema[target], inner) if inwards > 0 else min(schema[target], inner)
        schema[target] = inner
    if schema.get("minimum", 0) >= _ONE_SIDED:
        schema.setdefault("maximum", _MOST)
    if schema.get("maximum", 0) <= -_ONE_SIDED:
        schema.setdefault("minimum", -_MOST)
    if _is_empty(schema) and not _is_empty(before):
        raise StructureFault(place, "has bounds that leave no number which is enforced exactly")


def _inner(bound: float, inwards: int, *, is_exclusive: bool, is_integer: bool) -> int:
    """The float64 next to a bound that is inside, in its exact value and in the digits that the library writes."""
    if is_integer and inwards < 0 and bound - is_exclusive >= 2**63 - 1:
        return 2**63 - 1  # the library reads it as 2^63, of which it makes the largest integer of 64 bits
    value = float(bound)
    if inwards * value < 0:
        value = math.copysign(min(abs(value), _MOST), value)
    while any(inwards * (whole - int(bound)) < is_exclusive for whole in (int(value), int(Decimal(repr(value))))):
        value = math.nextafter(value, inwards * math.inf)
    return int(value)


def _rounded(value: float, inwards: int) -> float:
    """The next number inwards that the library reads exactly: of 15 digits, the last at the 22nd place or before."""
    rounding = ROUND_CEILING if inwards > 0 else ROUND_FLOOR
    digits = Context(prec=15, rounding=rounding).create_decimal(repr(value))
    return float(digits.quantize(Decimal("1e-22"), context=Context(prec=50, rounding=rounding)))


def _is_empty(schema: dict[str, Any]) -> bool:
    least = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    most = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    return bool(least and most) and max(least) > min(most)
