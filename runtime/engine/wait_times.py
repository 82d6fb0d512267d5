"""What each request waits for before its first launch, and how long, without a look at all of them."""

from __future__ import annotations

from typing import Final

from runahead.runtime.wire.parameters import WaitReason

Reasons = tuple[WaitReason, WaitReason]
Waited = tuple[float, ...]  # seconds, by WaitReason
_NOBODY: Final = (WaitReason.LAUNCH, WaitReason.LAUNCH)


class WaitTimes:
    """Seconds for which each reason has held so far, in all. A request compares two readings.

    Requests that need a penalty slot may wait for something else than others. Times are on the engine's clock.
    """

    def __init__(self) -> None:
        self._reasons: Reasons = _NOBODY
        self._since = 0.0
        self._totals = [0.0] * len(WaitReason), [0.0] * len(WaitReason)

    def planned(self, reasons: Reasons, now: float) -> None:
        """A plan was made now. reasons: of `WaitingQueue.reasons`."""
        if reasons != self._reasons:
            self._add_up(now)
            self._reasons = reasons

    def read(self, has_penalty: bool, now: float) -> Waited:
        """Return the seconds of each reason, for a request with or without penalties."""
        self._add_up(now)
        return tuple(self._totals[has_penalty])

    def begin(self, has_penalty: bool, now: float, sent_at: float) -> Waited:
        """Return the reading with which a request's wait begins. sent_at: when its front end sent the request, which
        has waited for the intake since then."""
        reading = list(self.read(has_penalty, now))
        reading[WaitReason.INTAKE] -= now - sent_at
        return tuple(reading)

    def longest(self, before: Waited, has_penalty: bool, now: float) -> tuple[WaitReason, float]:
        """Return the reason that held longest since `before` was read, and its seconds."""
        waited = [after - then for after, then in zip(self.read(has_penalty, now), before, strict=True)]
        return max(zip(WaitReason, waited, strict=True), key=lambda entry: entry[1])

    def _add_up(self, now: float) -> None:
        for totals, reason in zip(self._totals, self._reasons, strict=True):
            totals[reason] += now - self._since
        self._since = now
