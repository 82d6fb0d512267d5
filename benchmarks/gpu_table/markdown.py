"""How figures stand in the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

NONE: Final = "–"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def over(one: float | None, other: float | None) -> str:
    return number(ratio(one, other), 3)


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other is not None else None


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.2%}"


def counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(of.items())) or NONE


def at_most(found: float | None, goal: float | None) -> str:
    """The verdict."""
    return NONE if goal is None or found is None else "met" if found <= goal else "missed"


def at_least(found: float | None, goal: float) -> str:
    """The verdict."""
    return NONE if found is None else "met" if found >= goal else "missed"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
