"""Formats of strings that llguidance enforces wider than their standards, as expressions that are exact or narrower."""

from __future__ import annotations

from typing import Any, Final

# RFC 3339, of the years 0001 to 9999. A leap second is 23:59:60 in UTC, and in a date-time at the end of June or of
# December.
_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOURS: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOURS}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOURS})"
_LEAP_SECOND: Final = r"23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00)"
# RFC 1123, and RFC 5890: two hyphens behind two characters are reserved, and what `xn--` begins is not looked into.
_LABEL: Final = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL})*"

# An expression that a text matches, and how many characters it may have. Email addresses stay with the library: the
# lengths in RFC 5321 are those that software must take at least.
_EXACT: Final[dict[str, tuple[str, int | None]]] = {
    "date": (f"^{_DATE}$", None),
    "time": (f"^(?:{_TIME}|{_LEAP_SECOND})$", None),
    "date-time": (f"^(?:{_DATE}[tT]{_TIME}|{_YEAR}-(?:06-30|12-31)[tT]{_LEAP_SECOND})$", None),
    "hostname": (f"^{_HOST}$", 253),
}


def replace_format(schema: dict[str, Any]) -> None:
    """Puts an expression in the place of a format that has one, beside what else the schema says."""
    if schema["format"] not in _EXACT:
        return
    expression, longest = _EXACT[schema.pop("format")]
    condition: dict[str, Any] = {"type": "string", "pattern": expression}
    if longest is not None:
        condition["maxLength"] = longest
    schema["allOf"] = [*schema.get("allOf", []), condition]
