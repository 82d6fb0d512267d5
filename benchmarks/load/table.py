"""Figures beside what they should be, and what was wrong."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Table:
    """Lines of a name, a figure and a goal. wrong: sentences, each of which fails the whole."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, found: str, goal: str = "") -> None:
        self.lines.append((name, found, goal))

    def add_time(self, name: str, times_s: Sequence[float], goal_ms: float | None = None) -> None:
        """Quantiles of times; the goal is for the 99th percentile."""
        if not times_s:
            self.add(name, "none")
            return
        p50, p99 = np.quantile(times_s, (0.5, 0.99)) * 1e3
        goal = "" if goal_ms is None else f"p99 < {goal_ms:.0f} ms{_verdict(p99 < goal_ms)}"
        self.add(name, f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, of {len(times_s)}", goal)

    def add_bound(self, name: str, found: str, goal: str, *, holds: bool) -> None:
        """Add a figure with its goal. holds: the figure reaches its goal."""
        self.add(name, found, goal + _verdict(holds))

    def text(self) -> str:
        """All of it, to be printed."""
        widths = [max(len(line[column]) for line in [("", "found", "goal"), *self.lines]) for column in range(3)]
        rows = [("", "found", "goal"), *self.lines]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        wrong = [f"WRONG: {sentence}" for sentence in self.wrong[:20]]
        if len(self.wrong) > len(wrong):
            wrong.append(f"WRONG: {len(self.wrong) - len(wrong)} more")
        return "\n".join([*lines, *wrong])


def machine() -> str:
    """What the figures were measured on, and how busy it is."""
    model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {load_average()}"


def load_average() -> str:
    """Format the load averages of the last 1, 5 and 15 minutes."""
    return "load average " + ", ".join(f"{load:.2f}" for load in os.getloadavg())


def _verdict(holds: bool) -> str:
    return "" if holds else " (missed)"
