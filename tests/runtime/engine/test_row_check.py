"""A drain compares the device's rows with the host's, field by field."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.engine.row_check import FIELDS, check_rows
from runahead.runtime.row_record import PENALTY_TENSORS, ROW_RECORD, ROW_TENSORS, token_mask
from runahead.runtime.scheduler.ledger import LedgerError
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import VOCAB

DEPTHS = [0, 1, 2, 4]
PENALTIES = PENALTY_TENSORS
OF_THE_RECORD = {"block_count", "penalty_entries", "history_count"}  # the lists that they count have changed since
RICH = SamplingParams(
    temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=(1 << 64) - 3, bias_ids=(7, 3), bias_values=(1.5, -2.0),
    allowed_mask=token_mask((3, 40, 90), VOCAB).tobytes(), logprobs=2, prompt_logprobs=1, repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
)  # fmt: skip


def half_way(depth: int = 2) -> Chain:
    """Drained with three rows in decode, r4 with all that a request may ask for, and one, r3, between two chunks of its
    prompt."""
    chain = make_chain(depth, schedule=no_step, max_prefill_tokens=16, penalty_slots=3)
    chain.submit(1, [3] * 10, max_tokens=60, min_tokens=2, stop_token_ids=(96,))
    chain.submit(2, [4] * 10, max_tokens=60, ignore_eos=True)
    chain.submit(4, [6, 7, 8] * 4, sampling=RICH, max_tokens=60, ignore_eos=True)
    chain.turn_until(lambda: min(len(chain.tokens().get(handle, [])) for handle in (2, 4)) > 3)
    chain.submit(3, [5] * 90, max_tokens=5)
    chain.turn_until(lambda: chain.is_running("r3"))
    chain.engine.drain("test")
    rows = chain.engine.scheduler.rows
    assert [rows.phase[chain.slot_of(name)] for name in ("r1", "r2", "r4", "r3")] == [
        RowPhase.DECODE,
        RowPhase.DECODE,
        RowPhase.DECODE,
        RowPhase.PREFILL,
    ]
    return chain


def offset_of(chain: Chain, row: str, field: str) -> int:
    """Where the field lies that a row has: in its row slot, or in its penalty slot."""
    slot = chain.slot_of(row)
    return int(chain.program.rows.penalty_slot[slot]) if field in PENALTIES else slot


def change(chain: Chain, field: str, place: int | tuple[int, int]) -> None:
    values = getattr(chain.program.rows, field)
    values[place] = not values[place] if values.dtype == np.bool_ else values[place] + 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_drain_half_way_finds_the_same_rows_on_both_sides_and_changes_nothing(depth: int) -> None:
    chain = half_way(depth)
    chain.run()
    undisturbed = make_chain()
    undisturbed.submit(2, [4] * 10, max_tokens=60, ignore_eos=True)
    undisturbed.run()
    assert chain.tokens()[2] == undisturbed.tokens()[2]


def compared() -> list[tuple[str, str]]:
    """What each row has. r3 has no last token yet, and none of the others has r4's lists."""
    lists = {"bias_ids", "bias_values", "allowed", *PENALTIES}
    plain = [field for field in FIELDS if field not in lists]
    rows = [(row, field) for row in ("r1", "r2", "r3") for field in plain if (row, field) != ("r3", "last_token")]
    return rows + [("r4", field) for field in FIELDS]


def test_every_field_that_the_device_keeps_of_a_row_is_compared() -> None:
    declared = set(ROW_RECORD.names)
    assert declared > OF_THE_RECORD
    assert set(FIELDS) == {*ROW_TENSORS, *PENALTIES} - {"parameters"} | declared - OF_THE_RECORD


@pytest.mark.parametrize(("row", "field"), compared())
def test_a_field_that_differs_stops_the_engine(row: str, field: str) -> None:
    chain = half_way()
    place = offset_of(chain, row, field)
    change(chain, field, place if getattr(chain.program.rows, field).ndim == 1 else (place, 0))
    told = (
        r"differs between the device and the host"
        if field == "in_prompt"
        else r"is .* on the device and .* on the host"
    )
    with pytest.raises(LedgerError, match=rf"^row {chain.slot_of(row)}: {field}(\[0\])? {told}$"):
        chain.engine.drain("test")


@pytest.mark.parametrize("field", ["bias_ids", "bias_values", "allowed", "counts", "in_prompt"])
def test_the_last_of_a_list_that_differs_is_seen_too(field: str) -> None:
    chain = half_way()
    last = {"bias_ids": 1, "bias_values": 1}.get(field, -1)
    change(chain, field, (offset_of(chain, "r4", field), last))
    with pytest.raises(LedgerError, match=field):
        chain.engine.drain("test")


def test_what_nobody_reads_is_not_compared() -> None:
    chain = half_way()
    plain, rich = chain.slot_of("r1"), chain.slot_of("r4")
    for field in ("bias_ids", "bias_values"):
        change(chain, field, (plain, 0))
        change(chain, field, (rich, 2))
    change(chain, "allowed", (plain, 0))
    free = next(slot for slot in range(3) if slot != offset_of(chain, "r4", "counts"))
    for field in PENALTIES:
        change(chain, field, (free, 0))
    chain.engine.drain("test")


def test_penalties_without_repetition_look_at_no_prompt() -> None:
    chain = make_chain(penalty_slots=1)
    sampling = SamplingParams(seed=5, presence_penalty=0.5)
    chain.submit(1, [6, 7, 8], sampling=sampling, max_tokens=60, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    chain.engine.drain("test")
    change(chain, "in_prompt", (0, 0))
    with pytest.raises(LedgerError, match="in_prompt differs"):
        chain.engine.drain("test")


def test_a_field_that_the_device_does_not_hand_over_is_missed() -> None:
    chain = half_way()
    device = dict(chain.device.read_rows())
    check_rows(device, chain.engine.scheduler)
    del device["parameters"]
    with pytest.raises(LedgerError, match="without parameters"):
        check_rows(device, chain.engine.scheduler)


def test_a_second_block_that_differs_is_seen_and_one_past_the_rows_own_is_not() -> None:
    chain = half_way()
    table, slot = chain.program.rows.block_table, chain.slot_of("r1")
    table[slot, -1] += 1
    chain.engine.drain("test")
    table[slot, 1] += 1
    with pytest.raises(LedgerError, match="block_table"):
        chain.engine.drain("test")


def test_rows_that_nobody_has_are_not_compared() -> None:
    chain = half_way()
    free = sorted(set(range(8)) - {chain.slot_of(name) for name in ("r1", "r2", "r3", "r4")})
    chain.program.rows.seq_len[free] = 77
    chain.engine.drain("test")


def test_a_device_without_row_state_has_nothing_to_compare() -> None:
    check_rows({}, half_way().engine.scheduler)


def test_the_shutdown_compares_too() -> None:
    chain = half_way()
    chain.program.rows.seq_len[chain.slot_of("r1")] += np.int32(1)
    with pytest.raises(LedgerError, match="seq_len"):
        chain.engine.run(stopping=lambda: True)


def test_what_a_drafter_knows_of_a_row_is_compared_where_there_is_one() -> None:
    chain = half_way()
    scheduler, device = chain.engine.scheduler, dict(chain.engine.device.read_rows())
    history = scheduler.rows.history.copy()
    lengths = {row: int(device["seq_len"][chain.slot_of(row)]) for row in ("r1", "r2", "r3", "r4")}
    for row, length in lengths.items():
        history[chain.slot_of(row), length:] = -1  # what is not known of it, or not read yet
    check_rows({**device, "history": history}, scheduler)
    for row, length in lengths.items():
        for place in (0, length - 1):
            other = history.copy()
            other[chain.slot_of(row), place] += 1
            with pytest.raises(LedgerError, match=f"^row {chain.slot_of(row)}: history differs between"):
                check_rows({**device, "history": other}, scheduler)
