"""Figures of a simulated run: quantiles of times, goodput, cache hits."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log
from typing import Final

from benchmarks.fleet.traffic import Request

_STEPS: Final = 100.0  # of a histogram between a time and e times it: 1 % apart


@dataclass(slots=True)
class Histogram:
    """How often each time came, in steps of 1 %."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, ms: float, times: int = 1) -> None:
        step = round(_STEPS * log(ms)) if ms > 1e-3 else -700
        self.counts[step] = self.counts.get(step, 0) + times

    def quantile(self, share: float) -> float:
        """Milliseconds, within 0.5 %; NaN of nothing."""
        left = share * sum(self.counts.values())
        for step in sorted(self.counts):
            left -= self.counts[step]
            if left <= 0:
                return exp(step / _STEPS)
        return float("nan")


@dataclass(slots=True)
class Figures:
    """What all replicas together did. Limits and times in ms.

    gaps: between two tokens of a request. failed: requests whose replica was lost after their first token. again: those
    that were sent to another one. waiting, running, kv: summed over `reports`, the reports of all replicas.
    """

    first_limit: float
    token_limit: float
    first: Histogram = field(default_factory=Histogram)
    gaps: Histogram = field(default_factory=Histogram)
    requests: int = 0
    finished: int = 0
    good: int = 0
    failed: int = 0
    again: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    launches: int = 0
    gpu_ms: float = 0.0
    end: float = 0.0
    reports: int = 0
    waiting: int = 0
    running: int = 0
    kv: float = 0.0

    def finish(self, request: Request, end: float) -> None:
        """The request's last token came at `end`."""
        self.finished += 1
        self.tokens += request.answer
        if end > self.end:
            self.end = end
        in_time = request.first - request.arrived <= self.first_limit
        if in_time and end - request.first <= self.token_limit * (request.answer - 1) + 1e-6:
            self.good += 1

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 1.0

    def numbers(self) -> dict[str, float]:
        """By the names under which they are printed, rounded."""
        reports, gpu_s = max(1, self.reports), max(1e-9, self.gpu_ms / 1e3)
        found = {
            "requests": self.requests,
            "first token p50 ms": self.first.quantile(0.5),
            "first token p99 ms": self.first.quantile(0.99),
            "gap p50 ms": self.gaps.quantile(0.5),
            "gap p99 ms": self.gaps.quantile(0.99),
            "good %": 100 * self.good_share,
            "good/s a GPU": self.good / gpu_s,
            "tokens/s": 1e3 * self.tokens / self.end if self.end else 0.0,
            "cached %": 100 * self.cached_tokens / max(1, self.prompt_tokens),
            "failed": self.failed,
            "sent again": self.again,
            "waiting a GPU": self.waiting / reports,
            "running a GPU": self.running / reports,
            "KV %": 100 * self.kv / reports,
            "launches": self.launches,
        }
        return {name: round(number, 2) for name, number in found.items()}
