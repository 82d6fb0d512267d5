"""The test mode of the CPU devices: whatever is given back is filled with nonsense, so that a late reader shows."""

from __future__ import annotations

from typing import Protocol

from cuda_graphs.rings import RingMemory
from runtime.scheduler import NO_SLOT, Release

_NONSENSE = -(1 << 20)


class PoisonedProgram(Protocol):
    """A program whose memory can be poisoned from the host."""

    def poison_blocks(self, blocks: tuple[int, ...]) -> None: ...

    def poison_slot(self, slot: int) -> None: ...


class RingPoison:
    """Poisons staging and result slots, KV blocks and row slots."""

    def __init__(self, program: PoisonedProgram, rings: RingMemory) -> None:
        self._program = program
        self._rings = rings

    def ring_slot(self, number: int) -> None:
        """The slots of a launch that has retired."""
        slot = self._rings.slot(number)
        self._rings.plan[slot] = _NONSENSE
        self._rings.bulk[slot] = _NONSENSE
        self._rings.cells[slot] = _NONSENSE
        self._rings.logprob[slot] = float("nan")

    def release(self, resource: Release) -> None:
        """What the fence lets go."""
        if resource.blocks:
            self._program.poison_blocks(resource.blocks)
        if resource.slot != NO_SLOT:
            self._program.poison_slot(resource.slot)
