"""How the kernels of rows that decode cut recurrent states into programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton


@dataclass(frozen=True, slots=True)
class StateTiling:
    """words: float32 numbers of a state that a program has, about. warps: of a program. Sums over a row of a state, and
    a norm's, have an order that hangs on both."""

    words: int
    warps: int

    def tile(self, size: int, state: int) -> int:
        """How many of a head's `size` numbers a program has, each with `state` that are kept of it."""
        state_tile: int = self.words // triton.next_power_of_2(state)
        return max(1, min(int(triton.next_power_of_2(size)), state_tile))


# The same for any number of rows from two on, and for one too in exact launches, so that a row's bits hang on itself
# alone among others. The fastest over all of them on an H200:
# docs/decisions/0047-recurrent-states-on-a-gpu.md.
STATES: Final = StateTiling(8192, 2)
# Of other launches of one row, whose products have bits of their own anyway: with as many numbers a program as above
# there would be too few programs. Measured in the launch, as described there, and for rows with drafts in
# docs/decisions/0041-drafts-on-a-gpu.md.
LONE_ROW: Final = StateTiling(2048, 4)
LONE_RUN: Final = StateTiling(4096, 4)
