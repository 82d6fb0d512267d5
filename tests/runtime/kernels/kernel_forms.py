"""Which forms of the kernels are compiled: all, or few that have every part between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

# What a form of a kernel may have in addition to its epilogue. A part that no compiled form had may not compile.
_PARTS: Final = (
    "GELU", "GATED", "ALL", "SQUARES", "SCALED", "ADDED", "GATE_FIRST", "CHAINED", "MASKED", "HOLDS",
    "SNAPSHOT_TOKENS", "SNAPSHOTS", "KEPT", "REPLAYS", "LOGISTIC", "GROUPS", "CAP", "FIRST", "SHARED", "LONE",
    "SPLIT", "SPREAD", "RAGGED", "SUMMED", "DRAFTS", "LISTS", "CONTEXT", "EARLY",
)  # fmt: skip


def kinds_of(kernel: str, arguments: tuple[Any, ...], options: Mapping[str, Any], forms: str) -> set[tuple[Any, ...]]:
    """Return what a form of this kernel adds to what is compiled: the whole form, or each of its parts."""
    if forms == "each":
        return {(kernel, index, part) for index, part in enumerate(_parts_of(arguments, options))}
    return {(kernel, *(_parts_of(arguments, options) if forms == "parts" else ()))}


def _parts_of(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return how a form differs from the kernel's other forms: arguments and biases that it lacks, and options."""
    for one in options.values():
        if hasattr(one, "_asdict"):
            options = {**options, **one._asdict()}
    return (
        *((one is None, getattr(one, "bias", one) is None) for one in arguments),
        None if "LONE" in options else options.get("EPILOGUE"),
        (options.get("SEGMENTS") == 1, options.get("PIECES"), options.get("HAS_BIAS")),
        options.get("Q_HEADS", 1) > 0,
        options.get("VERIFIES", False),
        options.get("WHICH"),
        options.get("BEFORE"),
        *(bool(options.get(name, False)) for name in _PARTS),
    )


def fewest(forms: Iterable[frozenset[tuple[Any, ...]]]) -> Iterator[frozenset[tuple[Any, ...]]]:
    """Yield few forms with all parts: repeatedly the first form with the most missing parts."""
    left = list(forms)
    missing = set[tuple[Any, ...]]().union(*left)
    while missing:
        best = max(left, key=lambda kinds: len(kinds & missing))
        missing -= best
        yield best
