"""Row state on the host devices: what S and apply do to it, and what F is then given."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.cuda_graphs.rings import (
    FAULT_NONE,
    FAULT_PLAN_NUMBER,
    NON_FINITE,
    STATUS_FAULT,
    STOPPED,
    TOKEN_MASK,
    VOID,
    RingLayout,
    allocate_rings,
)
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.plan import stage
from runahead.runtime.programs.cpu.rows import HostRows
from tests.runtime.programs.host_rows import (
    BLOCK,
    MAX_ROWS,
    PLAIN,
    RICH,
    VOCAB,
    admission,
    admit,
    advance,
    chunk_of,
    decoding,
    make_rows,
    plan_of,
    run,
    stopping_rows,
)

# ---------------------------------------------------------------- what F runs on


def test_a_row_that_was_left_out_of_plans_comes_back_without_the_drafts_that_it_had() -> None:
    """Behind that F it may be held, and its run would be verified against logits of long ago."""
    rings = allocate_rings(RingLayout(4, 256, 256, MAX_ROWS, 1, drafts=3))
    rows = HostRows(rings, MAX_ROWS, 4, VOCAB, BLOCK, 4, 4, masks=MaskMemory(MAX_ROWS, VOCAB, 3))
    decoding(rows, {0: 6, 2: 9})
    rows.drafted[[0, 2]] = 2
    for number, slots in ((1, [0]), (2, [0]), (3, [0, 2])):  # launches without drafts
        run(rows, plan_of(number, slots))
        rows.draft()
    assert rows.drafted[[0, 2]].tolist() == [0, 0]


def test_a_row_that_is_held_has_no_drafts_looked_at_whatever_its_ring_slot_holds() -> None:
    rings = allocate_rings(RingLayout(4, 256, 256, MAX_ROWS, 1, drafts=3))
    rows = HostRows(rings, MAX_ROWS, 4, VOCAB, BLOCK, 4, 4, masks=MaskMemory(MAX_ROWS, VOCAB, 3))
    decoding(rows, {0: 6, 1: 7})
    rows.mask_epoch[0] = 5
    rings.drafted[:] = 3  # of a launch before
    number = rows.begin()
    places, _, _ = rows.judged(np.arange(2), np.arange(2), 3)
    assert places.tolist() == [1]
    assert rings.drafted[rings.slot(number), 0] == 0


def test_an_admission_leaves_no_forced_run_of_the_row_before_it_in_its_slot() -> None:
    """A row whose drafts a grammar forces gets none from the drafter."""
    rings = allocate_rings(RingLayout(4, 256, 256, MAX_ROWS, 1, drafts=3, prompt_tokens=40))
    rows = HostRows(rings, MAX_ROWS, 4, VOCAB, BLOCK, 4, 4)
    rows.forced[2] = True
    admit(rows, 1, admission(2, PLAIN, ()))
    assert not rows.forced[2]


def test_a_decode_row_asks_with_its_last_token_at_its_last_position() -> None:
    rows = make_rows()
    decoding(rows, {0: 6, 2: 9})
    run(rows, plan_of(1, [0, 2]))
    queries = rows.queries()
    assert queries.token_ids.tolist() == [20, 22]
    assert queries.positions.tolist() == [5, 8]
    assert queries.slot_mapping.tolist() == [1 * BLOCK + 5, 22 * BLOCK + 0]
    assert queries.seq_lens.tolist() == [6, 9]
    assert queries.query_start_loc.tolist() == [0, 1, 2]
    assert queries.sample_queries.tolist() == [0, 1]
    assert queries.sample_slots.tolist() == queries.slots.tolist() == [0, 2]


def test_a_dead_row_writes_to_the_null_block_and_reads_nothing() -> None:
    rows = make_rows()
    decoding(rows, {0: 6, 2: 9})
    rows.alive[2] = False
    run(rows, plan_of(1, [0, 2]))
    queries = rows.queries()
    assert queries.slot_mapping[0] == 1 * BLOCK + 5
    assert queries.slot_mapping[1] < BLOCK, "block 0 is the null block"
    assert queries.seq_lens.tolist() == [6, 0]


def test_dead_rows_beside_a_chunk_and_under_one_write_to_the_null_block() -> None:
    rows = make_rows()
    decoding(rows, {0: 6, 1: 7, 2: 0})
    rows.alive[1] = rows.alive[2] = False
    run(rows, plan_of(1, [0, 1, 2], chunks=(chunk_of(2, 0, 3),)))
    queries = rows.queries()
    assert queries.seq_lens.tolist() == [6, 0, 0]
    assert queries.slot_mapping[0] == 1 * BLOCK + 5
    assert (queries.slot_mapping[1:] < BLOCK).all()


def test_a_chunk_brings_its_own_tokens_over_the_border_of_two_blocks() -> None:
    rows = make_rows()
    decoding(rows, {1: 9, 3: 0})
    run(rows, plan_of(1, [1, 3], chunks=(chunk_of(3, 6, 4),)))
    queries = rows.queries()
    assert queries.token_ids.tolist() == [21, 30, 31, 32, 33]
    assert queries.positions.tolist() == [8, 6, 7, 8, 9]
    first, second = 31 * BLOCK, 32 * BLOCK
    assert queries.slot_mapping.tolist() == [12 * BLOCK, first + 6, first + 7, second, second + 1]
    assert queries.seq_lens.tolist() == [9, 10]
    assert queries.query_start_loc.tolist() == [0, 1, 5]
    assert queries.sample_queries.tolist() == [0, 4]
    assert rows.seq_len[3] == 10


def test_a_row_whose_prompt_goes_on_is_not_sampled() -> None:
    rows = make_rows()
    decoding(rows, {1: 9, 3: 0})
    run(rows, plan_of(1, [1, 3], chunks=(chunk_of(3, 0, 8, samples=False),)))
    queries = rows.queries()
    assert queries.sample_slots.tolist() == [1]
    assert queries.sample_queries.tolist() == [0]
    places, slots = rows.to_sample()
    assert (places.tolist(), slots.tolist()) == ([0], [1])


def test_a_plan_without_a_row_list_goes_on_with_the_rows_before_it() -> None:
    rows = make_rows()
    decoding(rows, {0: 6, 2: 9})
    run(rows, plan_of(1, [0, 2]))
    assert run(rows, plan_of(2, [0, 2], changed=False, appends=[(2, 1, 44)])) == 64 + 3 * 4
    assert rows.queries().slots.tolist() == [0, 2]
    assert rows.block_table[2].tolist() == [21, 44, 23, 24]


def test_a_row_list_after_a_chunk_samples_every_row_again() -> None:
    rows = make_rows()
    decoding(rows, {1: 9, 3: 0})
    run(rows, plan_of(1, [1, 3], chunks=(chunk_of(3, 0, 8, samples=False),)))
    run(rows, plan_of(2, [1, 3]))
    assert rows.to_sample()[1].tolist() == [1, 3]
    assert rows.queries().query_start_loc.tolist() == [0, 1, 2], "the chunk is not run twice"


@pytest.mark.parametrize("token", [-(1 << 20), 1 << 27])
def test_a_token_outside_the_vocabulary_never_reaches_the_embedding(token: int) -> None:
    rows = make_rows()
    decoding(rows, {0: 6, 1: 9})
    rows.last_token[0] = token
    run(rows, plan_of(1, [0, 1]))
    assert 0 <= rows.queries().token_ids[0] < VOCAB


# ---------------------------------------------------------------- plans and admissions


def test_a_plan_of_another_launch_masks_every_row_and_says_so() -> None:
    rows = make_rows()
    decoding(rows, {0: 6, 2: 9})
    run(rows, plan_of(1, [0, 2], chunks=(chunk_of(2, 0, 4),)))
    rows.begin()
    slot = rows.rings.slot(2)
    stage(plan_of(9, [0, 2], appends=[(0, 0, 60)]), rows.rings.plan[slot], rows.rings.bulk[slot])
    assert rows.apply() == 64, "nothing but the header was read"
    assert rows.rings.status[slot, STATUS_FAULT] == FAULT_PLAN_NUMBER
    assert rows.rows.size == rows.chunks.size == rows.to_sample()[0].size == 0
    assert rows.queries().token_ids.size == 0
    assert rows.block_table[0, 0] == 1, "its block-table entries were not taken"


def test_a_fault_is_cleared_when_its_slot_is_used_again() -> None:
    rows = make_rows()
    rows.rings.status[:, STATUS_FAULT] = FAULT_PLAN_NUMBER
    run(rows, plan_of(1, []))
    assert rows.rings.status[rows.rings.slot(1), STATUS_FAULT] == FAULT_NONE


def test_an_admission_brings_every_parameter_of_its_row() -> None:
    rows = make_rows()
    admit(rows, 1, admission(2, RICH, (7, 8)))
    assert rows.alive[2]
    assert rows.seq_len[2] == 8
    assert rows.block_table[2].tolist() == [5, 0, 0, 0]
    assert (rows.temperature[2], rows.top_k[2], rows.top_p[2], rows.min_p[2]) == (0.5, 3, 0.5, 0.25)
    assert rows.seed[2].view(np.uint64) == (1 << 64) - 5
    assert (rows.logprobs[2], rows.min_position[2], rows.max_position[2]) == (2, 14, 21)
    assert rows.stop_ids[2].tolist() == [1, 7, 8, -1]
    assert rows.bias_count[2] == 2
    assert rows.bias_ids[2, :2].tolist() == [4, 9]
    assert rows.bias_values[2, :2].tolist() == [1.5, -2.0]
    assert rows.allowed_words[2] == 3
    assert np.unpackbits(rows.allowed[2].view(np.uint8), bitorder="little").nonzero()[0].tolist() == [0, 33, 69]


def test_an_admission_leaves_nothing_of_the_row_before_it_in_its_slot() -> None:
    used, fresh = make_rows(), make_rows()
    admit(used, 1, admission(2, RICH, (7, 8)))
    used.block_table[2], used.seq_len[2], used.alive[2] = 63, 30, False
    admit(used, 2, admission(2, PLAIN, ()))
    admit(fresh, 1, admission(2, PLAIN, ()))
    for field in ("parameters", "seq_len", "alive", "block_table", "stop_ids"):
        assert np.array_equal(getattr(used, field)[2], getattr(fresh, field)[2]), field
    assert (used.bias_count[2], used.allowed_words[2]) == (0, 0), "what is past the counts is never read"


def test_an_admission_touches_no_other_slot() -> None:
    rows = make_rows()
    decoding(rows, {1: 6, 3: 9})
    before = {name: value.copy() for name, value in vars(rows).items() if isinstance(value, np.ndarray)}
    admit(rows, 1, admission(2, RICH, (7, 8)))
    for name, value in before.items():
        if len(value) == MAX_ROWS + 1:
            others = [0, 1, 3, 4]
            assert np.array_equal(getattr(rows, name)[others], value[others]), name


# ---------------------------------------------------------------- S


def test_a_token_goes_to_the_row_and_to_its_cell() -> None:
    rows = stopping_rows()
    assert advance(rows, {0: 40, 1: 41}).tolist() == [40, 41]
    assert rows.last_token[:2].tolist() == [40, 41]
    assert rows.seq_len[:2].tolist() == [7, 10]
    assert rows.alive[:2].all()


def test_a_stop_id_ends_the_row_but_not_below_its_min_position() -> None:
    rows = stopping_rows()
    rows.min_position[:2] = (6, 10)
    assert advance(rows, {0: 50, 1: 50}).tolist() == [50 | STOPPED, 50]
    assert rows.alive[:2].tolist() == [False, True]
    assert advance(rows, {1: 50}).tolist() == [50 | STOPPED]


def test_what_memory_holds_in_the_place_of_stop_ids_ends_no_row_that_has_none() -> None:
    rows = stopping_rows()
    rows.stop_count[:2] = 0
    assert advance(rows, {0: 50, 1: 50}).tolist() == [50, 50]


def test_the_last_position_ends_the_row_whatever_its_token() -> None:
    rows = stopping_rows()
    rows.max_position[0] = 6
    assert advance(rows, {0: 40, 1: 41}).tolist() == [40 | STOPPED, 41]
    assert rows.seq_len[0] == 7


def test_a_row_that_is_not_finite_ends_and_does_not_advance() -> None:
    rows = stopping_rows()
    low = advance(rows, {0: 40, 1: 41}, finite=(False, True))
    assert low[0] & ~TOKEN_MASK == STOPPED | NON_FINITE
    assert low[1] == 41
    assert rows.seq_len[:2].tolist() == [6, 10]
    assert rows.alive[:2].tolist() == [False, True]


def test_a_row_that_had_ended_stays_as_it_is_and_its_cell_is_void() -> None:
    rows = stopping_rows()
    rows.alive[0] = False
    assert advance(rows, {0: 50, 1: 41}).tolist() == [VOID, 41]
    assert (rows.last_token[0], rows.seq_len[0], rows.alive[0]) == (20, 6, False)
