"""Which states the rows of an F go on with, in NumPy, from the row state that apply has left.

States of rows and snapshots lie in the same memory: state slots first, one for each row, then the snapshots, 1 and so
on. Behind its blocks a row's line of the block table has its snapshots: a place for each border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runahead.runtime import plan as layout
from runahead.runtime.programs.cpu.inputs import Queries

if TYPE_CHECKING:
    from runahead.runtime.programs.cpu.rows import HostRows

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Of the B rows of an F, int32 each [B]. Slots are places among the states in memory; see the same names of
    `runahead.runtime.kernels.forward_batch.ForwardBatch`. lengths: tokens that the row's state stands for behind it."""

    slots: NDArray[np.int32]
    read_from: NDArray[np.int32]
    replayed: NDArray[np.int32]
    certain: NDArray[np.int32]
    copied_to: NDArray[np.int32]
    copied_after: NDArray[np.int32]
    lengths: NDArray[np.int32]


def place_of_snapshot(rows: HostRows, snapshot: int) -> int:
    """Of a snapshot, which is numbered from 1 on."""
    return rows.seq_len.size - 2 + snapshot  # behind the state slots, one fewer than there are lines of row state


def state_places_of(rows: HostRows, queries: Queries) -> StatePlaces:
    """A row goes on from the state that it has, by the tokens of its run before that S has kept: those between the
    length of its state and its first query token. Its newest token is certain; drafts behind it are not.

    A row that begins behind a cached prefix reads the snapshot behind it. A row that comes to a border with a snapshot,
    by a token that is certain, leaves its state there too.
    """
    slots, live = queries.slots, queries.seq_lens > 0
    own, had = rows.state_slot[slots], rows.state_len[slots]
    starts, counts = queries.positions[queries.query_start_loc[:-1]], np.diff(queries.query_start_loc)
    is_chunk = np.zeros(slots.size, np.bool_)
    is_chunk[rows.chunks[:, layout.CHUNK_ROW]] = True
    certain = np.where(is_chunk, counts, 1)
    begins = is_chunk & (starts == rows.block_count[slots] * rows.block_size)
    replayed = np.where(live & ~begins, starts - had, 0)
    lengths = np.where(live, starts + certain, had)
    from_snapshot = begins & (rows.begins_as[slots] > 0)
    read_from = np.where(from_snapshot, place_of_snapshot(rows, 0) + rows.begins_as[slots], own)
    copied_to, border = _borders(rows, slots, np.where(begins, starts, had), lengths, live)
    found = own, read_from, replayed, certain, copied_to, border - starts + replayed, lengths
    return StatePlaces(*(column.astype(np.int32) for column in found))


def _borders(
    rows: HostRows,
    slots: NDArray[np.int64],
    had: NDArray[np.int64],
    lengths: NDArray[np.int64],
    live: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where these rows leave a snapshot, or NOWHERE, and of how many tokens. had, lengths: tokens that their states
    stand for before and behind this F. There is one border at most: a run is no longer than what lies between two."""
    every = rows.snapshot_tokens
    if not every:
        return np.full(slots.size, NOWHERE), lengths
    border = lengths // every * every
    reached = live & (border > had)
    columns = np.where(reached, rows.max_blocks - 1 + border // every, 0)
    taken = np.where(reached, rows.block_table[slots, columns], 0)
    return np.where(taken > 0, place_of_snapshot(rows, 0) + taken, NOWHERE), border
