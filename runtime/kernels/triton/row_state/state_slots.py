"""Which states the rows of an F go on with, on the device: `runahead.runtime.programs.cpu.inputs` as a kernel's
part.

States of rows and snapshots lie in the same memory: state slots first, one for each row, then the snapshots, 1 and so
on. Behind its blocks a row's line of the block table has its snapshots: a place for each boundary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.row_state.record import int_of, offset_of

_STATE_SLOT, _BEGINS_AS = offset_of("state_slot"), offset_of("begins_as")
_BLOCK_COUNT = offset_of("block_count")


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Where apply leaves them, at fixed addresses, for the R rows of an F: int32 each. Slots are places among the
    states in memory. S row slots.

    snapshot_tokens: from one boundary with a snapshot of a row's state to the next; 0: there are none. max_blocks: of a
    row, behind which its snapshots lie. replays: rows keep states and have drafts, so that a row's state may lack
    tokens.
    """

    slots: torch.Tensor  # [R] each row's state slot; below 0: it has none
    read_from: torch.Tensor  # [R] the slot that it goes on from, where there are snapshots
    copied_to: torch.Tensor  # [R] the snapshot in which it leaves its state, too; below 0: in none
    # Where rows have drafts, as the same names of `ForwardBatch`.
    replayed: torch.Tensor  # [R]
    copied_after: torch.Tensor  # [R]
    lengths: torch.Tensor  # [S] by row slot: tokens that the row's state stands for, behind the newest F that had it
    snapshot_tokens: int
    max_blocks: int
    replays: bool

    def of(self, num_rows: int) -> dict[str, Any]:
        """Fields of the `ForwardBatch` of so many rows. What is certain of a row with drafts the kernels know: it
        decodes, and that is its newest token."""
        snapshots, here = self.snapshot_tokens > 0, slice(num_rows)
        return {
            "state_slots": self.slots[here],
            "states_read_from": self.read_from[here] if snapshots else None,
            "states_copied_to": self.copied_to[here] if snapshots else None,
            "replayed": self.replayed[here] if self.replays else None,
            "copied_after": self.copied_after[here] if self.replays and snapshots else None,
        }


def make_state_slots(
    max_rows: int, max_blocks: int, device: torch.device, snapshot_tokens: int = 0, *, replays: bool = False
) -> StateSlots:
    """Of no row yet."""
    rows = triton.next_power_of_2(max_rows)

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    return StateSlots(
        zeros(rows), zeros(rows), zeros(rows), zeros(rows), zeros(rows), zeros(max_rows + 1), snapshot_tokens,
        max_blocks, replays,
    )  # fmt: skip


@triton.jit
def snapshot_slots(
    row, slot, start, length, parameters, block_table, lengths, slots, read_from, copied_to, replayed, copied_after,
    TABLE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NULL_SLOT: tl.constexpr, EVERY: tl.constexpr,
    REPLAYS: tl.constexpr,
):  # fmt: skip
    """Of one row of F. start: position of its first query token. length: tokens that its state stands for behind this
    F; 0: it is masked, and its state and what it stands for stay as they are. TABLE: words of a line of the block
    table, of which the first BLOCKS are blocks.

    A row goes on from the state that it has, by the tokens of its run before that S has kept: those between the length
    of its state and its first query token. A boundary that it comes to has a snapshot, or none.
    """
    own = int_of(parameters, slot, _STATE_SLOT)
    tl.store(slots + row, own)
    begins = start == int_of(parameters, slot, _BLOCK_COUNT) * BLOCK_SIZE
    had = start
    if REPLAYS:
        had = tl.where(begins, start, tl.load(lengths + slot))
        tl.debug_barrier()  # what is written here is read by other threads
        tl.store(lengths + slot, length, mask=length > 0)
        tl.store(replayed + row, tl.where(length > 0, start - had, 0))
    if EVERY > 0:
        # Snapshots lie behind the state slots, which are as many as there are rows, and are numbered from 1 on.
        begun_as = int_of(parameters, slot, _BEGINS_AS)
        tl.store(read_from + row, tl.where(begins & (begun_as > 0), NULL_SLOT - 1 + begun_as, own))
        at_boundary = (length > 0) & (length % EVERY == 0)
        if REPLAYS:
            at_boundary = (length > 0) & (length // EVERY * EVERY > had)
            tl.store(copied_after + row, tl.where(at_boundary, length // EVERY * EVERY - had, 0))
        boundary = block_table + slot * TABLE + BLOCKS - 1 + length // EVERY
        taken = tl.load(boundary, mask=at_boundary, other=0)
        tl.store(copied_to + row, tl.where(taken > 0, NULL_SLOT - 1 + taken, -1))
