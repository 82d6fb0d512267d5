"""Which states the rows of an F go on with, and where they are kept, from the row state alone."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.programs.host_queries import Queries
from runahead.runtime.programs.host_rows import HostRows
from runahead.runtime.programs.host_states import NOWHERE, place_of_snapshot, state_places_of

ROWS, BLOCK, EVERY = 5, 4, 8
SLOT, STATE_SLOT = 2, 3


def rows_with(snapshots: tuple[int, ...], begins_as: int = 0, cached_blocks: int = 0) -> HostRows:
    rows = HostRows(allocate_rings(RingLayout(2, 64, 64, ROWS, 1)), ROWS, 6, 50, BLOCK, 4, 4, snapshot_tokens=EVERY)
    rows.state_slot[SLOT], rows.begins_as[SLOT], rows.block_count[SLOT] = STATE_SLOT, begins_as, cached_blocks
    rows.block_table[SLOT, 6 : 6 + len(snapshots)] = snapshots
    return rows


def queries(start: int, count: int, is_live: bool = True) -> Queries:
    """Of one row, `count` query tokens from position `start` on."""
    nothing = np.zeros(count, np.int64)
    return Queries(
        token_ids=nothing,
        positions=start + np.arange(count),
        slot_mapping=nothing,
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([start + count if is_live else 0], np.int32),
        slots=np.array([SLOT]),
        sample_queries=nothing[:1],
        sample_slots=np.array([SLOT]),
    )


def test_snapshots_lie_behind_the_state_slots() -> None:
    assert place_of_snapshot(rows_with(()), 1) == ROWS


@pytest.mark.parametrize(("start", "count"), [(7, 1), (0, 8), (4, 4)])
def test_a_row_that_reaches_a_border_leaves_its_state_in_the_borders_snapshot(start: int, count: int) -> None:
    places = state_places_of(rows_with((9, 11)), queries(start, count))
    assert (places.slots.tolist(), places.read_from.tolist()) == ([STATE_SLOT], [STATE_SLOT])
    assert places.copied_to.tolist() == [ROWS - 1 + 9]
    assert state_places_of(rows_with((9, 11)), queries(15, 1)).copied_to.tolist() == [ROWS - 1 + 11]


@pytest.mark.parametrize(("start", "count"), [(6, 1), (8, 1), (0, 7), (8, 4)])
def test_a_row_elsewhere_leaves_none(start: int, count: int) -> None:
    assert state_places_of(rows_with((9, 11)), queries(start, count)).copied_to.tolist() == [NOWHERE]


def test_a_border_without_a_snapshot_and_a_row_that_is_masked_leave_none() -> None:
    assert state_places_of(rows_with((0, 11)), queries(7, 1)).copied_to.tolist() == [NOWHERE]
    assert state_places_of(rows_with((9, 11)), queries(7, 1, is_live=False)).copied_to.tolist() == [NOWHERE]


def test_a_row_begins_with_its_snapshot_in_its_first_chunk_alone() -> None:
    rows = rows_with((0, 11, 12), begins_as=7, cached_blocks=2)
    assert state_places_of(rows, queries(8, 8)).read_from.tolist() == [ROWS - 1 + 7]
    assert state_places_of(rows, queries(16, 3)).read_from.tolist() == [STATE_SLOT]
    assert state_places_of(rows_with((9,)), queries(0, 3)).read_from.tolist() == [STATE_SLOT], "from zeros"
