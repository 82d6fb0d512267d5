"""Which languages have been run, for the line in the end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Languages:
    """Languages that a session has run, and those that it has skipped, with the reason."""

    run: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """How many of each, and which."""
        skipped = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.skipped.items()))
        return (
            f"clients: {_counted(len(self.run))} run ({', '.join(sorted(self.run)) or 'none'}), "
            f"{len(self.skipped)} skipped ({skipped or 'none'})"
        )


def _counted(number: int) -> str:
    return f"{number} language{'' if number == 1 else 's'}"
