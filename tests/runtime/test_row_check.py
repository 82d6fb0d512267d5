"""A drain compares the device's rows with the host's, field by field."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.engine import Barrier
from runtime.ledger import LedgerError
from runtime.row_check import check_rows
from runtime.rows import RowPhase
from tests.runtime.chain import Chain, make_chain, no_step

DEPTHS = [0, 1, 2, 4]


def half_way(depth: int = 2) -> Chain:
    """Drained with two rows in decode and one between two chunks of its prompt."""
    chain = make_chain(depth, schedule=no_step, max_prefill_tokens=16)
    chain.submit(1, [3] * 10, max_tokens=60, min_tokens=2, stop_token_ids=(96,))
    chain.submit(2, [4] * 10, max_tokens=60, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens().get(2, [])) > 3)
    chain.submit(3, [5] * 90, max_tokens=5)
    chain.turn_until(lambda: chain.is_running("r3"))
    chain.engine.drain(Barrier("test"))
    rows = chain.engine.scheduler.rows
    assert [rows.phase[chain.slot_of(name)] for name in ("r1", "r2", "r3")] == [
        RowPhase.DECODE,
        RowPhase.DECODE,
        RowPhase.PREFILL,
    ]
    return chain


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_drain_half_way_finds_the_same_rows_on_both_sides_and_changes_nothing(depth: int) -> None:
    chain = half_way(depth)
    chain.run()
    undisturbed = make_chain()
    undisturbed.submit(2, [4] * 10, max_tokens=60, ignore_eos=True)
    undisturbed.run()
    assert chain.tokens()[2] == undisturbed.tokens()[2]


FIELDS = ("alive", "seq_len", "block_table", "min_position", "max_position", "stop_ids", "last_token")
# A row that still reads its prompt has no last token.
COMPARED = [(row, field) for row in ("r1", "r2", "r3") for field in FIELDS if (row, field) != ("r3", "last_token")]


@pytest.mark.parametrize(("row", "field"), COMPARED)
def test_a_field_that_differs_stops_the_engine(row: str, field: str) -> None:
    chain = half_way()
    values, slot = getattr(chain.program.rows, field), chain.slot_of(row)
    if field == "alive":
        values[slot] = False
    else:
        values.reshape(len(values), -1)[slot, 0] += 1
    with pytest.raises(LedgerError, match=f"row {slot}: {field} is .* on the device and .* on the host"):
        chain.engine.drain(Barrier("test"))


def test_a_second_block_that_differs_is_seen_and_one_past_the_rows_own_is_not() -> None:
    chain = half_way()
    table, slot = chain.program.rows.block_table, chain.slot_of("r1")
    table[slot, -1] += 1
    chain.engine.drain(Barrier("test"))
    table[slot, 1] += 1
    with pytest.raises(LedgerError, match="block_table"):
        chain.engine.drain(Barrier("test"))


def test_rows_that_nobody_has_are_not_compared() -> None:
    chain = half_way()
    free = sorted(set(range(8)) - {chain.slot_of(name) for name in ("r1", "r2", "r3")})
    chain.program.rows.seq_len[free] = 77
    chain.engine.drain(Barrier("test"))


def test_a_device_without_row_state_has_nothing_to_compare() -> None:
    check_rows({}, half_way().engine.scheduler)


def test_the_shutdown_compares_too() -> None:
    chain = half_way()
    chain.program.rows.seq_len[chain.slot_of("r1")] += np.int32(1)
    with pytest.raises(LedgerError, match="seq_len"):
        chain.engine.run(stopping=lambda: True)
