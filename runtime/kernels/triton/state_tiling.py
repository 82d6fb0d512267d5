"""How the kernels of rows that decode cut recurrent states into programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton


@dataclass(frozen=True, slots=True)
class StateTiling:
    """words: float32 numbers of a state that a program has, about. warps: of a program. No bit hangs on either: what is
    summed up of a state is a row of it, which one warp has."""

    words: int
    warps: int

    def tile(self, size: int, state: int) -> int:
        """How many of a head's `size` numbers a program has, each with `state` that are kept of it."""
        held: int = self.words // triton.next_power_of_2(state)
        return max(1, min(int(triton.next_power_of_2(size)), held))


_DEFAULT: Final = StateTiling(4096, 4)


def state_tiling(rows: int) -> StateTiling:
    """rows: of the launch."""
    return _DEFAULT
