"""Tilings of recurrent states for rows that decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton


@dataclass(frozen=True, slots=True)
class StateTiling:
    """The size of a program's part of a state. words: about the number of its float32 numbers. warps: of a program. No
    bit depends on them for states of up to 256 numbers, whose rows both tilings sum in the same order; sums of squares
    have no order."""

    words: int
    warps: int

    def tile(self, size: int, state: int) -> int:
        """Return how many of a head's `size` rows of `state` numbers a program has."""
        state_tile: int = self.words // triton.next_power_of_2(state)
        return max(1, min(int(triton.next_power_of_2(size)), state_tile))


STATES: Final = StateTiling(8192, 2)  # the fastest for several rows: docs/decisions/0047-recurrent-states-on-a-gpu.md
# Of a lone row, which would leave most of the GPU idle with so few programs: see there, and for rows with drafts
# docs/decisions/0041-drafts-on-a-gpu.md.
LONE_ROW: Final = StateTiling(2048, 4)
LONE_RUN: Final = StateTiling(4096, 4)
