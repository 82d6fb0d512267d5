"""Seconds as the engine counts them here: they pass when the script says so, never by themselves."""

from __future__ import annotations


class Clock:
    """now: seconds. Steps are sums of powers of two, so that no sum of them is rounded."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """So much later."""
        self.now += seconds
