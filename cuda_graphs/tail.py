"""Where the tail of a launch begins: the last layers of F, during which the host enqueues another launch. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The host needs 0.4 ms in the median and about 1.5 ms under load to take arrivals, plan, stage and enqueue.
TAIL_MS: Final = 2.0
_LEAST_FRACTION: Final = 0.25  # of F before the tail; below, a later plan gains less than the extra wake-up costs


@dataclass(frozen=True, slots=True)
class TailPlacement:
    """Chooses the layer after which the tail begins.

    layers: of F. least_ms: time of the shortest launch. ms_per_token: of the longest launch, by query tokens. Both are
    measured on masked rows, whose attention takes no time, and a shorter launch takes more time a token. So their
    estimate of a launch's time is too low, and its tail too long, if anything. The default has no layers: every launch
    is in its tail once it is sampled.
    """

    layers: int = 0
    least_ms: float = 0.0
    ms_per_token: float = 0.0

    def layers_before(self, tokens: int) -> int:
        """Return how many layers of a launch with these query tokens run before its tail. 0: all of F is its tail."""
        if not tokens:
            return 0
        fraction = 1 - TAIL_MS / max(self.least_ms, self.ms_per_token * tokens, TAIL_MS)
        return int(fraction * self.layers) if fraction >= _LEAST_FRACTION else 0
