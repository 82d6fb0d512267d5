"""The test mode that fills whatever is given back with nonsense, as the engine's loop sees it."""

from __future__ import annotations

from typing import Protocol

from runahead.runtime.scheduler.outcomes import Release


class Poison(Protocol):
    """The test mode: whatever is given back is filled with nonsense."""

    def ring_slot(self, number: int) -> None: ...

    def release(self, resource: Release) -> None: ...
