"""Recurrent states of F's rows on the device, like `runahead.runtime.programs.cpu.inputs`.

States and snapshots share one memory: a state slot for each row, then the snapshots, numbered from 1. A row's line of
the block table has its snapshots after its blocks, one entry for each boundary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.row_state.record import int_of, offset_of

_STATE_SLOT, _BEGINS_AS = offset_of("state_slot"), offset_of("begins_as")
_BLOCK_COUNT = offset_of("block_count")


class StateSlots(NamedTuple):
    """The state indexes that apply writes, at fixed addresses, for the R rows of an F: int32 each. A slot is an index
    into the states' memory. S row slots.

    snapshot_tokens: between two boundaries with a snapshot; 0: none. max_blocks: of a row, before its snapshots.
    replays: rows have states and drafts, so a state may lack tokens.
    """

    slots: torch.Tensor  # [R] each row's state slot; below 0: it has none
    read_from: torch.Tensor  # [R] the slot that it goes on from, where there are snapshots
    copied_to: torch.Tensor  # [R] the snapshot in which it leaves its state, too; below 0: in none
    # If rows have drafts, under the names of `ForwardBatch`.
    replayed: torch.Tensor  # [R]
    copied_after: torch.Tensor  # [R]
    lengths: torch.Tensor  # [S] by row slot: tokens that the row's state stands for, behind the newest F that had it
    snapshot_tokens: int
    max_blocks: int
    replays: bool

    def of(self, num_rows: int) -> dict[str, Any]:
        """Return the state fields of a `ForwardBatch`. For rows with drafts the rest is implied: they decode, and only
        the newest token is certain.
        """
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
    """Make empty buffers."""
    rows = triton.next_power_of_2(max_rows)

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    return StateSlots(
        zeros(rows), zeros(rows), zeros(rows), zeros(rows), zeros(rows), zeros(max_rows + 1), snapshot_tokens,
        max_blocks, replays,
    )  # fmt: skip


@triton.jit
def snapshot_slots(row, slot, start, length, state, states, SIZES: tl.constexpr):
    """Write the indexes of one row of F to `states`. start: position of its first query token. length: tokens that its
    state covers after this F; 0: masked, so its state stays.

    The row continues from its state with the accepted tokens of its previous run: those between the state's length and
    its first query token. Boundaries without a snapshot are skipped.
    """
    own = int_of(state.parameters, slot, _STATE_SLOT)
    tl.store(states.slots + row, own)
    begins = start == int_of(state.parameters, slot, _BLOCK_COUNT) * SIZES.BLOCK_SIZE
    had = start
    if SIZES.REPLAYS:
        had = tl.where(begins, start, tl.load(states.lengths + slot))
        tl.debug_barrier()  # other threads read what is written here
        tl.store(states.lengths + slot, length, mask=length > 0)
        tl.store(states.replayed + row, tl.where(length > 0, start - had, 0))
    EVERY: tl.constexpr = SIZES.SNAPSHOT_TOKENS
    if EVERY > 0:
        # Snapshots follow the state slots, one for each row, and are numbered from 1.
        begun_as = int_of(state.parameters, slot, _BEGINS_AS)
        tl.store(states.read_from + row, tl.where(begins & (begun_as > 0), SIZES.NULL_SLOT - 1 + begun_as, own))
        at_boundary = (length > 0) & (length % EVERY == 0)
        if SIZES.REPLAYS:
            at_boundary = (length > 0) & (length // EVERY * EVERY > had)
            tl.store(states.copied_after + row, tl.where(at_boundary, length // EVERY * EVERY - had, 0))
        boundary = state.block_table + slot * SIZES.TABLE + SIZES.BLOCKS - 1 + length // EVERY
        taken = tl.load(boundary, mask=at_boundary, other=0)
        tl.store(states.copied_to + row, tl.where(taken > 0, SIZES.NULL_SLOT - 1 + taken, -1))
