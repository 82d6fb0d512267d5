"""A run's results as figures, a table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runahead.service.commands.bench.calls import Outcome


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a good request: it finished, with its first token and its mean token time in these bounds."""

    first_token_ms: float
    token_ms: float

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.failure or outcome.first_token_s is None:
            return False
        return 1e3 * outcome.first_token_s <= self.first_token_ms and 1e3 * outcome.token_s <= self.token_ms


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one rate; fields are keys of the JSON. A time is None without a measurement.

    rate: requests a second; 0: all at once. failure: the first failed request's.
    tokens_per_s, good_per_s: over the whole run. gap_ms: between messages with tokens. token_ms: mean of the requests'
        means. good: ratio to all requests. late_ms_p99: delay of sending; a late client measures itself.
    """

    rate: float
    requests: int
    failed: int
    failure: str
    tokens: int
    wanted_tokens: int
    seconds: float
    tokens_per_s: float
    first_token_ms_p50: float | None
    first_token_ms_p99: float | None
    gap_ms_p50: float | None
    gap_ms_p99: float | None
    gap_ms_max: float | None
    token_ms_mean: float | None
    good: float
    good_per_s: float
    late_ms_p99: float | None


def figures(rate: float, outcomes: Sequence[Outcome], seconds: float, goal: Goal) -> Figures:
    """Compute the figures. outcomes: at least one."""
    firsts = sorted(each.first_token_s for each in outcomes if each.first_token_s is not None)
    gaps = sorted(gap for each in outcomes for gap in each.gaps_s)
    means = [each.token_s for each in outcomes if each.tokens > 1]
    failures = [each.failure for each in outcomes if each.failure]
    tokens, good = sum(each.tokens for each in outcomes), sum(map(goal.is_met, outcomes))
    return Figures(
        rate=rate,
        requests=len(outcomes),
        failed=len(failures),
        failure=failures[0] if failures else "",
        tokens=tokens,
        wanted_tokens=sum(each.wanted for each in outcomes),
        seconds=round(seconds, 3),
        tokens_per_s=round(tokens / seconds, 1) if seconds else 0.0,
        first_token_ms_p50=_quantile_ms(firsts, 0.5),
        first_token_ms_p99=_quantile_ms(firsts, 0.99),
        gap_ms_p50=_quantile_ms(gaps, 0.5),
        gap_ms_p99=_quantile_ms(gaps, 0.99),
        gap_ms_max=_quantile_ms(gaps, 1.0),
        token_ms_mean=_ms(sum(means) / len(means)) if means else None,
        good=round(good / len(outcomes), 4),
        good_per_s=round(good / seconds, 3) if seconds else 0.0,
        late_ms_p99=_quantile_ms(sorted(each.late_s for each in outcomes), 0.99),
    )


_HEADS: Final = (
    "rate/s", "requests", "failed", "tokens/s", "first token ms p50", "p99", "gap ms p50", "p99", "max", "ms/token",
    "good %", "good/s",
)  # fmt: skip

_NARROWEST: Final = 8  # column width in characters


def head() -> str:
    """Return the table's heading."""
    return "  ".join(f"{name:>{_NARROWEST}}" for name in _HEADS)


def row(found: Figures) -> str:
    """Return a line of the table."""
    cells = (
        f"{found.rate:g}", str(found.requests), str(found.failed), f"{found.tokens_per_s:.0f}",
        *map(_cell, (found.first_token_ms_p50, found.first_token_ms_p99)),
        *map(_cell, (found.gap_ms_p50, found.gap_ms_p99, found.gap_ms_max, found.token_ms_mean)),
        f"{100 * found.good:.1f}", f"{found.good_per_s:.2f}",
    )  # fmt: skip
    return "  ".join(f"{cell:>{max(_NARROWEST, len(name))}}" for cell, name in zip(cells, _HEADS, strict=True))


def _cell(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f}"


def _quantile_ms(ordered: Sequence[float], fraction: float) -> float | None:
    """Return the quantile by nearest rank."""
    return _ms(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]) if ordered else None


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
