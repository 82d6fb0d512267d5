"""Which states the rows of an F go on with, and where they are kept, from the row state alone."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.plan import CHUNK_WORDS
from runahead.runtime.programs.cpu.inputs import NOWHERE, Queries, slot_of_snapshot, state_slots_of
from runahead.runtime.programs.cpu.rows import HostRows

ROWS, BLOCK, EVERY = 5, 4, 8
SLOT, STATE_SLOT = 2, 3


def rows_with(
    snapshots: tuple[int, ...], *, had: int = 0, begins_as: int = 0, cached_blocks: int = 0, is_chunk: bool = False
) -> HostRows:
    """had: tokens that the row's state stands for. is_chunk: F has a chunk of the row."""
    rows = HostRows(allocate_rings(RingLayout(2, 64, 64, ROWS, 1)), ROWS, 6, 50, BLOCK, 4, 4, snapshot_tokens=EVERY)
    rows.state_slot[SLOT], rows.begins_as[SLOT], rows.block_count[SLOT] = STATE_SLOT, begins_as, cached_blocks
    rows.state_len[SLOT] = had
    rows.block_table[SLOT, 6 : 6 + len(snapshots)] = snapshots
    rows.chunks = np.zeros((int(is_chunk), CHUNK_WORDS), np.int32)
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
    assert slot_of_snapshot(rows_with(()), 1) == ROWS


@pytest.mark.parametrize(("start", "count", "snapshot"), [(0, 8, 9), (4, 4, 9), (12, 4, 11)])
def test_a_chunk_that_reaches_a_border_leaves_its_state_in_the_borders_snapshot(
    start: int, count: int, snapshot: int
) -> None:
    places = state_slots_of(rows_with((9, 11), had=start, is_chunk=True), queries(start, count))
    assert (places.slots.tolist(), places.read_from.tolist()) == ([STATE_SLOT], [STATE_SLOT])
    assert (places.replayed.tolist(), places.certain.tolist()) == ([0], [count])
    assert (places.copied_to.tolist(), places.copied_after.tolist()) == ([ROWS - 1 + snapshot], [count])
    assert places.lengths.tolist() == [start + count]


@pytest.mark.parametrize(
    ("had", "start", "drafts", "copied_after"),
    [(7, 7, 0, 1), (7, 7, 3, 1), (5, 7, 0, 3), (5, 8, 2, 3), (6, 10, 3, 2)],
)
def test_a_border_is_reached_by_the_newest_token_or_by_drafts_that_were_kept(
    had: int, start: int, drafts: int, copied_after: int
) -> None:
    """had: the length of the state, behind which drafts were kept up to the newest token, at `start`."""
    places = state_slots_of(rows_with((9, 11), had=had), queries(start, 1 + drafts))
    assert (places.replayed.tolist(), places.certain.tolist()) == ([start - had], [1])
    assert (places.copied_to.tolist(), places.copied_after.tolist()) == ([ROWS - 1 + 9], [copied_after])
    assert places.lengths.tolist() == [start + 1], "drafts are in no state before they are kept"


@pytest.mark.parametrize(("had", "start", "count"), [(6, 6, 1), (8, 8, 1), (8, 8, 4), (6, 6, 4), (4, 6, 2)])
def test_a_row_elsewhere_and_a_draft_beyond_a_border_leave_none(had: int, start: int, count: int) -> None:
    places = state_slots_of(rows_with((9, 11), had=had), queries(start, count))
    assert places.copied_to.tolist() == [NOWHERE]


def test_a_border_without_a_snapshot_and_a_row_that_is_masked_leave_none() -> None:
    assert state_slots_of(rows_with((0, 11), had=7), queries(7, 1)).copied_to.tolist() == [NOWHERE]
    masked = state_slots_of(rows_with((9, 11), had=5), queries(7, 1, is_live=False))
    assert (masked.copied_to.tolist(), masked.lengths.tolist()) == ([NOWHERE], [5]), "its state stays as it is"


def test_a_row_begins_with_its_snapshot_in_its_first_chunk_alone() -> None:
    rows = rows_with((0, 11, 12), had=99, begins_as=7, cached_blocks=2, is_chunk=True)
    places = state_slots_of(rows, queries(8, 8))
    assert (places.read_from.tolist(), places.replayed.tolist()) == ([ROWS - 1 + 7], [0])
    rows.state_len[SLOT] = 16
    assert state_slots_of(rows, queries(16, 3)).read_from.tolist() == [STATE_SLOT]
    begins = state_slots_of(rows_with((9,), had=99, is_chunk=True), queries(0, 3))
    assert (begins.read_from.tolist(), begins.replayed.tolist()) == ([STATE_SLOT], [0]), "from zeros"
