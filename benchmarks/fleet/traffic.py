"""Requests from a seed: when they arrive, whose prefix they share, and how long they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

ARRIVALS: Final = ("poisson", "bursts", "diurnal")
NO_TENANT: Final = -1
_SLICE_S: Final = 60  # of traffic that is drawn at once
_BURST, _BURST_S, _BETWEEN_S = 3.0, 10.0, 60.0  # times the usual rate; mean lengths
_SWING: Final = 0.6  # of the mean rate, up and down, in a day


@dataclass(slots=True)
class Request:
    """Times in ms. arrived: at the router. first: its first token; 0 before. prefix: tokens it shares with its tenant's
    other requests. prompt: tokens, the prefix included. answer: tokens generated, known since no answer ends early."""

    arrived: float
    tenant: int
    prefix: int
    prompt: int
    answer: int
    first: float = 0.0

    @property
    def own(self) -> int:
        """Tokens that no other request shares."""
        return self.prompt - self.prefix + self.answer


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a simulated day. rate: requests a second, on average. day_s: length of a day of `diurnal`.
    tenants, zipf: who shares a prefix of `prefix` tokens, tenant k with weight 1 / k ** zipf; without tenants none do.
    prompt, answer: median tokens behind the prefix and generated, lognormal with `spread`, within a twelfth and five
    times the median."""

    rate: float
    seconds: float
    arrivals: str = "poisson"
    seed: int = 1
    day_s: float = 3600.0
    tenants: int = 0
    zipf: float = 1.0
    prefix: int = 0
    prompt: int = 400
    answer: int = 125
    spread: float = 0.7

    @property
    def longest_prompt(self) -> int:
        return 5 * self.prompt + (self.prefix if self.tenants else 0)

    def rates(self) -> NDArray[np.float64]:
        """Requests a second in each second. Their mean over whole days is `rate`. [seconds]"""
        count = max(1, math.ceil(self.seconds))
        if self.arrivals == "diurnal":
            middles = np.arange(count) + 0.5
            return self.rate * (1 - _SWING * np.cos(2 * math.pi * middles / self.day_s))
        if self.arrivals == "bursts":
            dice = np.random.default_rng([self.seed, 1])
            factors, at_s, bursts = np.ones(count), 0.0, False
            while at_s < count:
                lasts = dice.exponential(_BURST_S if bursts else _BETWEEN_S)
                if bursts:
                    factors[int(at_s) : math.ceil(at_s + lasts)] = _BURST
                at_s, bursts = at_s + lasts, not bursts
            return self.rate * factors / factors.mean()
        return np.full(count, self.rate)

    def requests(self) -> Iterator[Request]:
        """In the order of their arrivals."""
        rates = self.rates()
        weights = 1 / np.arange(1, self.tenants + 1) ** self.zipf
        shares = np.cumsum(weights) / weights.sum() if self.tenants else np.zeros(0)
        for begin in range(0, len(rates), _SLICE_S):
            dice = np.random.default_rng([self.seed, 2, begin])
            edges = np.concatenate([[0.0], np.cumsum(rates[begin : begin + _SLICE_S])])  # requests up to each second
            count = dice.poisson(edges[-1])
            at_s = begin + np.interp(np.sort(dice.uniform(0, edges[-1], count)), edges, np.arange(len(edges)))
            prompts, answers = (self._lengths(dice, median, count) for median in (self.prompt, self.answer))
            prefix = self.prefix if self.tenants else 0
            tenants = np.searchsorted(shares, dice.uniform(size=count)) if self.tenants else np.full(count, NO_TENANT)
            found = zip(at_s.tolist(), tenants.tolist(), (prompts + prefix).tolist(), answers.tolist(), strict=True)
            for at, tenant, prompt, answer in found:
                if at < self.seconds:
                    yield Request(1e3 * at, tenant, prefix, prompt, answer)

    def _lengths(self, dice: np.random.Generator, median: int, count: int) -> NDArray[np.int64]:
        drawn = median * np.exp(self.spread * dice.standard_normal(count))
        return np.maximum(1, np.rint(np.clip(drawn, median / 12, median * 5))).astype(np.int64)
