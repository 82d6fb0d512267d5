"""What a client's command says of a flag whose value is invalid."""

from __future__ import annotations

from typing import Final

_SHOWN: Final = 80  # characters of a value


class UsageError(ValueError):
    """A flag whose value is invalid. One sentence that names the flag, what it accepts and what it was given."""

    @classmethod
    def of(cls, flag: str, accepts: str, given: object) -> UsageError:
        text = repr(given)
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return cls(f"--{flag.replace('_', '-')} must be {accepts}, and is {shown}")
