"""Measures how fast room is made while calls wait, for the retry delay."""

from __future__ import annotations

from typing import Final

from runahead.service.contract.limits import LIMITS

MEASURE_S: Final = 0.5  # between measurements, about
_HALF_LIFE_S: Final = 10.0  # after which a measurement counts half
_ENOUGH_S: Final = 0.25  # measured before an estimate is made


class Pace:
    """The pace at which held amounts are given back. now: monotonic, seconds.

    Time in which nothing was held does not count.
    """

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._left = self._held = 0
        self._busy_s = self._given_back = 0.0  # both decay with the half-life

    def measure(self, held: int, left: int, now: float) -> None:
        """Record a measurement. held: now. left: the total given back so far."""
        if self._looked_at is not None and (self._held or left > self._left):
            since_s = now - self._looked_at
            older = 0.5 ** (since_s / _HALF_LIFE_S)
            self._busy_s = self._busy_s * older + since_s
            self._given_back = self._given_back * older + (left - self._left)
        self._looked_at, self._held, self._left = now, held, left

    def wait_s(self, ahead: int) -> float:
        """Return the seconds until `ahead` more is given back, within the bounds of `Limits`."""
        if self._busy_s < _ENOUGH_S:
            wait_s = LIMITS.retry_s
        elif not self._given_back:
            wait_s = max(LIMITS.retry_s, self._busy_s)  # at least as long again
        else:
            wait_s = ahead * self._busy_s / self._given_back
        return min(LIMITS.retry_most_s, max(LIMITS.retry_least_s, wait_s))
