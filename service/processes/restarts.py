"""How often a front end is started again, and after how long."""

from __future__ import annotations

from typing import Final

BACK_OFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # before each start, of those that follow each other closely
SERVED_S: Final = 30.0  # whoever has served for so long has not died of its start


class Restarts:
    """Of one front end."""

    def __init__(self) -> None:
        self._deaths = 0  # in a row

    def died(self, served_s: float) -> float | None:
        """It has died, after serving for so long. Returns the seconds to wait before it is started again, or None when
        it has died so often that it is not."""
        self._deaths = 1 if served_s >= SERVED_S else self._deaths + 1
        return BACK_OFF_S[self._deaths - 1] if self._deaths <= len(BACK_OFF_S) else None
