"""How fast room is made, measured while somebody waits for it: from that follows when to try again."""

from __future__ import annotations

from typing import Final

from runahead.service.contract.limits import LIMITS

LOOK_S: Final = 0.5  # from one look to the next, about
_HALF_LIFE_S: Final = 10.0  # after which what was measured counts half
_ENOUGH_S: Final = 0.25  # of measuring, before which nothing is known


class Pace:
    """The pace at which held amounts are given back. now: seconds of a monotonic clock.

    Time in which nothing was held does not count: that nothing was given back in it says nothing.
    """

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._left = self._held = 0
        self._busy_s = self._given_back = 0.0  # both counted half after each half-life

    def look(self, held: int, left: int, now: float) -> None:
        """held: at the moment. left: all that was ever given back."""
        if self._looked_at is not None and (self._held or left > self._left):
            since_s = now - self._looked_at
            older = 0.5 ** (since_s / _HALF_LIFE_S)
            self._busy_s = self._busy_s * older + since_s
            self._given_back = self._given_back * older + (left - self._left)
        self._looked_at, self._held, self._left = now, held, left

    def wait_s(self, ahead: int) -> float:
        """Seconds until `ahead` more is given back, within the bounds that `Limits` sets for them."""
        if self._busy_s < _ENOUGH_S:
            wait_s = LIMITS.retry_s
        elif not self._given_back:
            wait_s = max(LIMITS.retry_s, self._busy_s)  # at least as long again
        else:
            wait_s = ahead * self._busy_s / self._given_back
        return min(LIMITS.retry_most_s, max(LIMITS.retry_least_s, wait_s))
