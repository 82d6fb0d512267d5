"""Which states the rows of an F go on with, in NumPy, from the row state that apply has left.

States of rows and snapshots lie in the same memory: state slots first, one for each row, then the snapshots, 1 and so
on. Behind its blocks a row's line of the block table has its snapshots: a place for each border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.programs.host_queries import Queries

if TYPE_CHECKING:
    from runahead.runtime.programs.host_rows import HostRows

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Places among the states in memory, of the B rows of an F. See the same names of
    `runahead.runtime.kernels.forward_batch.ForwardBatch`."""

    slots: NDArray[np.int32]  # [B]
    read_from: NDArray[np.int32]  # [B]
    copied_to: NDArray[np.int32]  # [B]


def place_of_snapshot(rows: HostRows, snapshot: int) -> int:
    """Of a snapshot, which is numbered from 1 on."""
    return rows.seq_len.size - 2 + snapshot  # behind the state slots, one fewer than there are lines of row state


def state_places_of(rows: HostRows, queries: Queries) -> StatePlaces:
    """A row that begins behind a cached prefix reads the snapshot behind it. A row whose last query token is the last
    before a border with a snapshot leaves its state there too."""
    slots = queries.slots
    own = rows.state_slot[slots]
    every = rows.snapshot_tokens
    if not every:
        return StatePlaces(own, own, np.full(slots.size, NOWHERE, np.int32))
    first = place_of_snapshot(rows, 0)
    starts, lengths = queries.positions[queries.query_start_loc[:-1]], queries.seq_lens
    begins = (rows.begins_as[slots] > 0) & (starts == rows.block_count[slots] * rows.block_size)
    at_border = (lengths > 0) & (lengths % every == 0)
    columns = np.where(at_border, rows.max_blocks - 1 + lengths // every, 0)
    taken = np.where(at_border, rows.block_table[slots, columns], 0)
    return StatePlaces(
        own,
        np.where(begins, first + rows.begins_as[slots], own).astype(np.int32),
        np.where(taken > 0, first + taken, NOWHERE).astype(np.int32),
    )
