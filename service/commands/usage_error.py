"""The error of an invalid flag of a client's command."""

from __future__ import annotations

from typing import Final

_SHOWN: Final = 80  # characters of a value


class UsageError(ValueError):
    """An invalid flag. One sentence with the flag, what it accepts and its value."""

    @classmethod
    def of(cls, flag: str, accepts: str, given: object) -> UsageError:
        text = repr(given)
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return cls(f"--{flag.replace('_', '-')} must be {accepts}, and is {shown}")
