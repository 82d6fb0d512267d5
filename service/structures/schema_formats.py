"""Exact or stricter regular expressions for string formats that llguidance enforces too loosely."""

from __future__ import annotations

from typing import Any, Final

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


def replace_format(schema: dict[str, Any]) -> None:
    """Replace a format by its regular expression, besides the schema's other keywords."""
    if schema["format"] not in _EXACT:
        return
    expression, longest = _EXACT[schema.pop("format")]
    condition: dict[str, Any] = {"type": "string", "pattern": expression}
    if longest is not None:
        condition["maxLength"] = longest
    schema["allOf"] = [*schema.get("allOf", []), condition]
