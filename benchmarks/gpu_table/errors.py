"""What goes wrong in a way that a sentence can explain."""

from __future__ import annotations


class BenchmarkError(RuntimeError):
    """What was measured is not what was meant, or can't be measured here: the sentence says why."""


class ResultError(ValueError):
    """A result can't be written, read or merged. The sentence says why, and names the file if there is one."""
