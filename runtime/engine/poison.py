"""The test mode of CPU devices: released memory is filled with nonsense, so that late readers are noticed."""

from __future__ import annotations

from typing import Protocol

from runahead.cuda_graphs.rings import RingMemory, cell_tag
from runahead.runtime.scheduler.outcomes import Release

_NONSENSE = -(1 << 20)


class PoisonedProgram(Protocol):
    """A program whose memory can be poisoned from the host."""

    def poison_blocks(self, blocks: tuple[int, ...]) -> None: ...

    def poison_row_slot(self, slot: int) -> None: ...

    def poison_penalty_slot(self, slot: int) -> None: ...

    def poison_state_slot(self, slot: int) -> None: ...

    def poison_snapshots(self, snapshots: tuple[int, ...]) -> None: ...


class Poison:
    """Poisons staging and result slots, KV blocks, row slots, and the other slots of rows."""

    def __init__(self, program: PoisonedProgram, rings: RingMemory) -> None:
        self._program = program
        self._rings = rings

    def ring_slot(self, number: int) -> None:
        """Poison the ring slots of a retired launch."""
        slot = self._rings.slot(number)
        self._rings.plan[slot] = _NONSENSE
        self._rings.bulk[slot] = _NONSENSE
        self._rings.drafted[slot] = 1 + self._rings.layout.drafts  # more drafts than there are
        self._rings.cells[slot] = cell_tag(number - 1)  # a tag that no launch of this slot writes
        self._rings.logprob[slot] = float("nan")
        self._rings.finite[slot] = -1
        self._rings.prompt_logprob[slot] = float("nan")
        self._rings.prompt_top_ids[slot] = _NONSENSE
        self._rings.prompt_top_logprobs[slot] = float("nan")

    def release(self, resource: Release) -> None:
        """Poison what the fence released and no request owns."""
        if resource.blocks:
            self._program.poison_blocks(tuple(resource.blocks))
        if resource.row_slot >= 0:
            self._program.poison_row_slot(resource.row_slot)
        if resource.penalty_slot >= 0:
            self._program.poison_penalty_slot(resource.penalty_slot)
        if resource.state_slot >= 0:
            self._program.poison_state_slot(resource.state_slot)
        if resource.snapshots:
            self._program.poison_snapshots(tuple(resource.snapshots))
