"""Whatever counts up for as long as the engine runs goes on across 2**31 and 2**32: an engine whose counters begin
shortly before either serves as one does that began at 0."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import (
    FAULT_NONE,
    FAULT_PLAN_NUMBER,
    STATUS_FAULT,
    CellError,
    RingLayout,
    allocate_rings,
    cell_tag,
    read_cells,
)
from runahead.runtime.engine.figures import LogMode, Snapshot
from runahead.runtime.engine.loop import Engine
from runahead.runtime.kernels.reference.philox import row_words, token_words
from runahead.runtime.plan import LaunchPlan, read_plan, stage
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import MAX_CONTEXT, EngineConfig
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.assembled import assembled
from tests.runtime.chain import Chain, MemoryLinks, make_chain
from tests.runtime.from_zero import Begun
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.programs.hash_model import VOCAB, completion
from tests.runtime.programs.hash_program import NullProgram

DEPTHS = [0, 1, 2, 4]
BORDERS = [1 << 31, 1 << 32]
BEFORE = 8  # how far before a border counters begin: a multiple of INTERVAL, so that the same launches are logged
INTERVAL = 4


@dataclass
class Served:
    """What front ends were told, with handles and owners counted from 0, and what the engine says of itself."""

    told: list[tuple[int, m.ToFrontEnd]]
    stats: EngineStats
    snapshots: list[Snapshot]


def counted_clock() -> Any:
    """Each look at the clock is a millisecond later than the one before."""
    looks = iter(range(1 << 30))
    return lambda: next(looks) / 1000


def chain_under_pressure(depth: int, counters_from: int, snapshots: list[Snapshot], **options: Any) -> Chain:
    return make_chain(
        depth,
        schedule=seeded_schedule(5),
        max_rows=3,
        num_blocks=8,
        penalty_slots=1,
        clock=counted_clock(),
        log_interval=INTERVAL,
        write_snapshot=snapshots.append,
        counters_from=counters_from,
        **options,
    )


def submit_all(chain: Chain, counters_from: int) -> None:
    """24 requests of two front ends, whose numbers, as the requests' handles, lie on either side of the border."""
    dice = np.random.default_rng(7)
    for i in range(1, 25):
        prompt = dice.integers(2, VOCAB, int(dice.integers(1, 20))).tolist()
        sampling = SamplingParams(
            seed=int(dice.integers(1 << 60)),
            presence_penalty=0.5 if i % 5 == 0 else 0.0,
            prompt_logprobs=2 if i % 4 == 0 else -1,
        )
        owner = counters_from + (BEFORE - 1 if i % 2 else BEFORE + 1)
        chain.submit(
            counters_from + i,
            prompt,
            owner=owner,
            request_id=f"r{i}",
            sampling=sampling,
            priority=int(i % 7 == 0),
            max_tokens=int(dice.integers(8, 30)),
            ignore_eos=True,
        )
    chain.tell(m.Abort(counters_from + BEFORE + 1, ("r3", "nobody")), owner=counters_from + BEFORE - 1)


def served(depth: int, counters_from: int, **options: Any) -> Served:
    """All of it, with an abort and evictions on the way."""
    snapshots: list[Snapshot] = []
    chain = chain_under_pressure(depth, counters_from, snapshots, **options)
    submit_all(chain, counters_from)
    chain.run()
    chain.check_nothing_is_left()
    stats = chain.engine.stats()
    assert stats.events["evicted"].count > 0 and stats.aborted
    assert stats.launches > counters_from + 4 * BEFORE, "the launches went far across the border"
    assert chain.engine.scheduler.rows.epoch.max() > counters_from + 2 * BEFORE, "and so did an epoch"
    begun = Begun(counters_from, counters_from, counters_from, counters_from)
    told = [begun.from_zero(owner, message) for owner, message in chain.links.sent]
    return Served(told, begun.stats(stats), [begun.snapshot(snapshot) for snapshot in snapshots])


@pytest.mark.parametrize("mode", list(LogMode))
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_counters_that_cross_a_border_on_the_simulated_device_change_nothing(
    depth: int, border: int, mode: LogMode
) -> None:
    expected = served(depth, 0, log_mode=mode)
    found = served(depth, border - BEFORE, log_mode=mode)
    assert found.told == expected.told
    assert found.stats == expected.stats
    assert found.snapshots == expected.snapshots
    assert expected.snapshots, "nothing was logged"


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_that_do_nothing_but_decode_cross_a_border_and_their_blocks_do_too(depth: int, border: int) -> None:
    chain = make_chain(depth, schedule=seeded_schedule(3), counters_from=border - 30)
    prompts = {border - 1: [3, 4], border: [5] * 7, border + 1: [6] * 12}
    for handle, prompt in prompts.items():
        chain.submit(handle, prompt, seed=handle, max_tokens=60, ignore_eos=True)
    chain.turn_until(lambda: chain.ledger.launched > border - 20)
    assert chain.engine.stats().events["admitted"].count == len(prompts), "from here on they decode"
    chain.run()
    assert chain.ledger.launched > border + 20
    assert chain.tokens() == {handle: completion(prompt, handle, 60, stops=()) for handle, prompt in prompts.items()}
    chain.check_nothing_is_left()


# ---------------------------------------------------------------- the host device


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    save(CASES[0], folder)
    return folder


def told_by_the_host_device(folder: Path, depth: int, counters_from: int) -> dict[tuple[int, int], list[int]]:
    """Tokens of eight requests of a real model by front end and handle, counted from 0; the last is the reason.

    The CPU device's test mode is on: delays, and poison in what is given back.
    """
    config = EngineConfig(
        model=str(folder), run_ahead=depth, max_rows=3, block_size=8, prefill_chunk=16, max_prefill_tokens=32,
        num_blocks=100, device="cpu", threads=1, jitter_seed=depth, counters_from=counters_from,
    )  # fmt: skip
    parts = assembled(config)
    links = MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=10, poison=parts.poison)
    for i in range(1, 9):
        sampling = SamplingParams(temperature=0.8 * (i % 2), seed=i, presence_penalty=0.5 * (i % 3 == 0))
        tokens = np.array([(37 * i + 11 * j) % 150 for j in range(3 * i)], np.int32).tobytes()
        stopping = StoppingParams(12, ignore_eos=True)
        handle = counters_from + BEFORE - 4 + i
        links.tell(counters_from + BEFORE + i % 2, m.Submit(handle, f"r{i}", tokens, sampling, stopping))
    engine.turn()
    while len(engine.registry):
        engine.turn()
    engine.run(lambda: True)
    parts.device.close()
    assert engine.ledger.launched > counters_from + 2 * BEFORE
    found: dict[tuple[int, int], list[int]] = {}
    for owner, output in links.sent:
        if isinstance(output, m.Output):
            handles, ids = np.frombuffer(output.handles, np.int64), np.frombuffer(output.tokens, np.int32)
            ends = [(end.handle, end.reason) for end in output.finished]
            for handle, token in [*zip(handles.tolist(), ids.tolist(), strict=True), *ends]:
                found.setdefault((owner - counters_from, handle - counters_from), []).append(token)
    assert len(found) == 8 and all(len(tokens) == 13 for tokens in found.values())
    return found


@pytest.mark.parametrize("depth", DEPTHS)
def test_counters_that_cross_a_border_on_the_host_device_change_nothing(depth: int, llama: Path) -> None:
    expected = told_by_the_host_device(llama, depth, 0)
    for border in BORDERS:
        assert told_by_the_host_device(llama, depth, border - BEFORE) == expected, f"across {border}"


# ---------------------------------------------------------------- the parts, one by one

NUMBERS = [
    (1 << 31) - 1,
    1 << 31,
    (1 << 31) + 1,
    (1 << 32) - 1,
    1 << 32,
    (1 << 32) + 1,
    (3 << 31) + 5,
    (1 << 62) + (1 << 31) + 7,
]


def plan(number: int) -> LaunchPlan:
    return LaunchPlan(number, np.zeros(0, np.int32), np.zeros(0, np.bool_), False, np.zeros((0, 3), np.int32))


def staged(number: int) -> NDArray[np.int32]:
    body = np.full(64, -1, np.int32)
    stage(plan(number), body, np.zeros(8, np.int32))
    return body


@pytest.mark.parametrize("number", NUMBERS)
def test_a_plan_carries_its_whole_number_in_the_64_bits_that_it_begins_with(number: int) -> None:
    assert read_plan(staged(number)).number == number
    assert staged(number)[:2].view(np.int64)[0] == number


@pytest.mark.parametrize("number", NUMBERS)
def test_a_plan_whose_number_differs_in_its_upper_half_alone_is_another_launchs(number: int) -> None:
    rings = allocate_rings(RingLayout(1, 64, 8, 2, 1))
    for planned, fault in ((number + (1 << 32), FAULT_PLAN_NUMBER), (number, FAULT_NONE)):
        rows = HostRows(rings, 2, 4, VOCAB, 8, 4, 4, launched=number - 1)
        rings.plan[0] = staged(planned)
        assert rows.begin() == number
        rows.apply()
        assert rings.status[0, STATUS_FAULT] == fault


@pytest.mark.parametrize("number", NUMBERS)
def test_a_cell_is_one_64_bit_word_with_the_number_as_far_as_32_bits_hold_it(number: int) -> None:
    cells = np.array([[cell_tag(number) | 42], [cell_tag(number) | 7]], np.int64)
    assert (cells.view(np.uint64) >> np.uint64(32)).tolist() == [[number % (1 << 32)]] * 2
    assert read_cells(cells, number).token.tolist() == [42, 7]
    for other in (number - 1, number + 3, number - (1 << 31), number ^ (1 << 31)):
        with pytest.raises(CellError, match="another launch's tokens"):
            read_cells(cells, other)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_null_program_of_the_benchmarks_counts_on(number: int) -> None:
    rings = allocate_rings(RingLayout(3, 64, 8, 2, 1))
    program = NullProgram(rings, max_rows=2, token=5, launched=number - 1)
    program.sample(LaunchShape(number, 2, Form.PLAIN, 2, 2, is_decode=True))
    assert read_cells(rings.cells[number % 3, :2], number).token.tolist() == [5, 5]


def test_no_position_is_so_far_on_that_32_bits_could_wrap() -> None:
    """Columns, the device's lengths and the random numbers' counter have 32 bits for them: the context is bounded."""
    last = np.array([MAX_CONTEXT - 1])
    assert last.astype(np.int32)[0] == last[0], "positions are signed"
    seed = np.array([7])
    words = row_words(seed, last, 8)
    before = [row_words(seed, last - (1 << bit), 8).tolist() for bit in range(22)]
    assert words.tolist() not in before, "no bit of the position is lost on its way into the counter"
    assert token_words(seed, last, np.array([5])) == words[0, 5]


def test_columns_that_grow_with_time_have_64_bits() -> None:
    rows = Rows(2, 4, 16)
    for name in ("epoch", "last_launch", "last_naming", "owner", "handle"):
        assert getattr(rows, name).dtype == np.int64, name


@pytest.mark.parametrize("border", BORDERS)
def test_a_launch_of_an_epoch_2_to_the_32_earlier_is_not_this_ones(border: int) -> None:
    rows = Rows(1, 4, 16, epoch=border - 1)
    slot = rows.allocate()
    slots = np.array([slot], np.int32)
    assert rows.still(slots, np.array([border], np.int64)).tolist() == [True]
    assert rows.still(slots, np.array([border - (1 << 32)], np.int64)).tolist() == [False]
