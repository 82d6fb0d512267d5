"""What the device says of a row is believed only where it can be true."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.device import DeviceError, LaunchShape
from runahead.cuda_graphs.rings import CellError, RingMemory
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.scheduler.ledger import LedgerError
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import completion
from tests.runtime.programs.hash_program import HashProgram

DEPTHS = [0, 1, 2, 3, 4]


class SickRows(HostRows):
    """The logits of rows in `sick_seeds` hold a NaN once they have `sick_from` tokens."""

    sick_seeds: tuple[int, ...] = ()
    sick_from = 0

    def advance(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], finite: NDArray[np.bool_],
        offset: int = 0, nothing_left: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        sick = np.isin(self.seed[slots], self.sick_seeds) & (self.seq_len[slots] >= self.sick_from)
        super().advance(indexes, slots, tokens, finite & ~sick, offset, nothing_left)


class SickProgram(HashProgram):
    """The hash model with `SickRows`."""

    rows: SickRows

    def __init__(self, rings: RingMemory, *, max_rows: int, block_size: int, context_length: int, **sizes: Any) -> None:
        super().__init__(rings, max_rows=max_rows, block_size=block_size, context_length=context_length, **sizes)
        max_blocks = -(-context_length // block_size)
        self.rows = SickRows(rings, max_rows, max_blocks, sizes["vocab_size"], block_size, 32, 1024)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("sick_from", [0, 9], ids=["at its first token", "later"])
def test_a_row_with_a_nan_in_its_logits_fails_and_its_neighbours_go_on(depth: int, sick_from: int) -> None:
    chain = make_chain(depth, schedule=no_step, program_type=SickProgram)
    assert isinstance(chain.program, SickProgram)
    chain.program.rows.sick_seeds, chain.program.rows.sick_from = (2,), sick_from
    for handle in (1, 2, 3):
        chain.submit(handle, [handle + 2] * 5, seed=handle, max_tokens=20, ignore_eos=True)
    chain.run()
    expected = {handle: completion([handle + 2] * 5, handle, 20, stops=()) for handle in (1, 2, 3)}
    assert [(end.reason, end.stop_token_id) for end in chain.finished()[2]] == [(FinishReason.NON_FINITE, -1)]
    assert chain.tokens().get(2, []) == expected[2][: max(0, sick_from - 5)], "the token of the NaN is none"
    for handle in (1, 3):
        assert chain.tokens()[handle] == expected[handle]
        assert [end.reason for end in chain.finished()[handle]] == [FinishReason.LENGTH]
    assert chain.engine.stats().generated_tokens == sum(len(tokens) for tokens in chain.tokens().values())
    chain.check_nothing_is_left()


def decoding(depth: int, program_type: type[HashProgram] = HashProgram) -> tuple[Chain, int]:
    """A chain with one row in decode, and the row's slot."""
    chain = make_chain(depth, schedule=no_step, program_type=program_type)
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens().get(1, [])) > 3)
    return chain, chain.slot_of("r1")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_that_the_device_ends_too_early_stops_the_engine(depth: int) -> None:
    chain, slot = decoding(depth)
    ends_at = chain.program.rows.max_position[slot] = chain.program.rows.seq_len[slot]
    said = f"row slot {slot}, .* with token [0-9]+ at position {ends_at}, of at most 42 .*: the device ended it$"
    with pytest.raises(LedgerError, match=f"disagree on which rows ended: {said}"):
        chain.run()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_that_the_device_does_not_end_stops_the_engine(depth: int) -> None:
    chain, slot = decoding(depth)
    chain.program.rows.max_position[slot] += 1
    said = f"row slot {slot}, .* with token [0-9]+ at position 41, of at most 42 .*: the device did not end it$"
    with pytest.raises(LedgerError, match=f"disagree on which rows ended: {said}"):
        chain.run()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_that_is_dead_on_the_device_alone_stops_the_engine(depth: int) -> None:
    chain, slot = decoding(depth)
    chain.program.rows.alive[slot] = False
    with pytest.raises(CellError, match="the device ended a row that goes on"):
        chain.run()


class LateCells(HashProgram):
    """From launch 8 on its result cells are those of the launch before."""

    def sample(self, shape: LaunchShape) -> None:
        super().sample(shape)
        if shape.number >= 8:
            self.rows.rings.cells[self.rows.rings.slot(shape.number)] -= 1 << 32


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cell_of_another_launch_is_never_taken_for_a_token(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, program_type=LateCells)
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    with pytest.raises(CellError, match="launch 8: its result slot holds another launch's tokens"):
        chain.run()
    assert len(chain.tokens()[1]) == 6, "launch 2 brought the first token, launch 7 the last that can be believed"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_slot_full_of_poison_is_never_taken_for_a_plan(depth: int) -> None:
    chain, _ = decoding(depth)
    rings, launch = chain.device.rings, chain.device.launch

    def launch_over_poison(shape: LaunchShape) -> None:
        rings.plan[rings.slot(shape.number)] = -(1 << 20)
        launch(shape)

    chain.device.launch = launch_over_poison  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="another launch's plan"):
        chain.run()


def test_a_plan_is_never_staged_over_one_that_has_not_retired() -> None:
    chain = make_chain(4, schedule=no_step, ring_slots=2)
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    with pytest.raises(LedgerError, match="plan 3 would overwrite the ring slot of a launch that has not retired"):
        chain.run()
    assert chain.device.rings.plan[:, 0].tolist() == [2, 1], "both plans are still there"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_device_that_fails_stops_the_engine_with_its_reason(depth: int) -> None:
    chain, _ = decoding(depth)
    chain.device.fail(ValueError("an illegal address"))
    with pytest.raises(DeviceError, match="an illegal address"):
        chain.run()
