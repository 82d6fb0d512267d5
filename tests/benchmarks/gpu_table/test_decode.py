"""The measurements themselves, on the CPU with a tiny model: the code that a GPU runs, but for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from benchmarks.gpu_table.decode import (
    Batch,
    bare_graphs,
    decoding,
    fill_cache,
    finish,
    form_of,
    prompt_of,
    sampling_of,
    submit,
    through_the_engine,
    turn_until,
)
from benchmarks.gpu_table.engines import Bench, FrontEnd, HoldingDevice, opened
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.floors import step_bytes
from benchmarks.gpu_table.kernel_times import Ran, traced
from benchmarks.gpu_table.parts import ragged
from benchmarks.gpu_table.settings import RUN_AHEAD, engine_settings
from benchmarks.gpu_table.shapes import FULL, SHAPES, SMALL, Workload
from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.runtime.wire import messages as m

TINY = SHAPES["tiny"]
ROWS = 4
SETTINGS = engine_settings("cpu", ROWS, SMALL.context)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with opened(TINY, SETTINGS, SMALL.chained) as bench:
        yield bench


def test_through_the_engine_every_row_has_all_of_its_tokens_and_launches_overlap(bench: Bench) -> None:
    steps = through_the_engine(bench, Batch((SMALL.prompt,) * ROWS), 2)
    assert len(steps.runs) == 2
    tokens = bench.engine.scheduler.tally.counters["generated_tokens"]
    assert tokens == 2 * ROWS * (SMALL.short + SMALL.long)
    assert steps.step_ms > 0 and steps.idle_us is not None and steps.host_us is not None
    assert steps.overlap is not None and 0 < steps.overlap <= 1


def test_a_hybrid_s_rows_leave_the_snapshots_that_its_device_has_room_for() -> None:
    settings = {**SETTINGS, "prefix_cache": True, "state_snapshot_blocks": 1}
    with opened(SHAPES["tiny-hybrid"], settings, SMALL.chained) as bench:
        through_the_engine(bench, Batch((SMALL.prompt,) * ROWS), 1)
        stats = bench.engine.stats()
        assert bench.engine.scheduler.limits.snapshots == ROWS
        assert stats.snapshots_kept > 0


def test_a_step_is_the_longer_run_less_the_shorter_one(bench: Bench) -> None:
    steps = through_the_engine(bench, Batch((SMALL.prompt,)), 1)
    ((short, long),) = steps.runs
    assert steps.step_ms == pytest.approx((long - short) / (SMALL.long - SMALL.short) * 1e3)


def test_bare_graphs_are_all_planned_before_the_first_one_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_on: list[tuple[int, int]] = []  # each launch, and the newest that was planned by then
    device = bench.device._device
    launch = device.launch

    def noting(shape: LaunchShape) -> None:
        handed_on.append((shape.number, bench.engine.ledger.launched))
        launch(shape)

    monkeypatch.setattr(device, "launch", noting)
    steps = bare_graphs(bench, Batch((SMALL.prompt,) * ROWS), 1)
    chained = [number for number, planned in handed_on if planned == bench.engine.ledger.launched]
    assert len(chained) > SMALL.steps, "the launches of the measured steps were planned together"
    assert max(chained) == bench.engine.ledger.launched, "to the last one"
    assert [number for number, _ in handed_on] == sorted(number for number, _ in handed_on)
    assert steps.step_ms > 0 and steps.idle_us is not None
    assert bench.engine.ledger.run_ahead == RUN_AHEAD


def test_the_figures_of_every_sampling_come_from_the_form_that_it_asks_for(bench: Bench) -> None:
    for sampling in ("greedy", "sampled", "one sampled", "one with log-probabilities"):
        batch = Batch((SMALL.prompt,) * ROWS, sampling)
        submit(bench, batch, SMALL.long)
        turn_until(bench, lambda: bench.front_end.tokens >= ROWS)
        held = bench.device.hold()
        bench.engine.turn()
        finish(bench)
        bench.front_end.check(ROWS, SMALL.long)
        forms = {shape.form for shape in held if shape.sample_rows == ROWS}
        assert forms == {form_of(batch.sampling)}, sampling
    wants = [sampling_of(row, "one sampled") for row in range(2)]
    assert [(one.temperature, one.top_p) for one in wants] == [(0.8, 0.9), (0.0, 1.0)]
    assert form_of("greedy") == Form.PLAIN


def test_the_depth_is_what_was_set_and_never_changes_while_a_launch_is_in_flight(bench: Bench) -> None:
    for depth in (0, 1, 4):
        bench.set_depth(depth)
        bench.engine.figures.depth_max = 0
        through_the_engine(bench, Batch((SMALL.prompt,)), 1)
        assert bench.engine.figures.depth_max == max(1, depth)
    submit(bench, Batch((SMALL.prompt,)), SMALL.long)
    bench.engine.turn()
    with pytest.raises(BenchmarkError, match="only while nothing runs"):
        bench.set_depth(1)
    finish(bench)


def test_prompts_that_were_run_before_come_from_the_cache(bench: Bench) -> None:
    fill_cache(bench, (SMALL.prompt,) * ROWS)
    before = bench.engine.stats().cached_tokens
    through_the_engine(bench, Batch((SMALL.prompt,) * ROWS), 1)
    block = bench.block_size
    assert bench.engine.stats().cached_tokens - before == 2 * ROWS * (SMALL.prompt // block * block)


def test_kernels_are_traced_over_whole_launches_and_their_stamps_are_read_before_others_take_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.gpu_table.kernel_times.LAUNCHES", 4)
    launched: list[int] = []
    starts: list[int] = []

    with opened(TINY, SETTINGS, 6) as tight:
        ledger, device = tight.engine.ledger, tight.device

        def trace(work: Callable[[], None]) -> list[Ran]:
            assert not ledger.in_flight
            first = ledger.launched + 1
            work()
            while device.ended() < ledger.launched:
                device.wait(ledger.launched, ledger.launched - 1, (), 10.0)
            launched.extend(range(first, ledger.launched + 1))
            starts.extend(int(device.rings.start_ns[device.rings.slot(number)]) for number in launched)
            return [Ran(name, at, 1.0) for at, name in enumerate(["_embed_kernel", "_split_kernel"] * len(launched))]

        found = traced(tight, Batch((SMALL.prompt,) * ROWS), step_bytes(tight.model.config, tight.model.dtype), trace)
        assert ledger.launched > launched[-1] + device.rings.layout.slots - len(launched), "others took their slots"
    assert found.launches == len(launched) >= 4
    assert {kernel.name: kernel.count for kernel in found.kernels} == {"_embed_kernel": 1.0, "_split_kernel": 1.0}
    assert found.step_us == (starts[-1] - starts[0]) / (len(starts) - 1) / 1e3
    assert found.context == SMALL.prompt + SMALL.generated


def test_a_request_that_is_refused_or_ends_early_is_no_measurement() -> None:
    front_end = FrontEnd()
    with pytest.raises(BenchmarkError, match="refused a request: too long"):
        front_end.send(1, m.Refused(1, "INVALID_ARGUMENT", "too long"))
    front_end.send(1, m.Output(1, b"", b"\0" * 4, (), (m.Finished(1, 1),)))
    with pytest.raises(BenchmarkError, match=r"1 requests of 2 tokens each brought 1; 1 ended: \{'END_OF_SEQUENCE'\}"):
        front_end.check(1, 2)


def test_without_graphs_decode_launches_alone_are_enqueued_kernel_by_kernel(bench: Bench) -> None:
    eagerly: list[LaunchShape] = []
    captured: list[LaunchShape] = []
    inner = bench.device._device

    def launch_eagerly(shape: LaunchShape) -> None:
        eagerly.append(shape)
        inner.launch(shape)

    class Captured(HoldingDevice):
        def launch(self, shape: LaunchShape) -> None:
            before = len(eagerly)
            super().launch(shape)
            if len(eagerly) == before:
                captured.append(shape)

    device = Captured(inner, launch_eagerly)
    bench.engine.device = device
    through_the_engine(bench, Batch((SMALL.prompt,)), 1)
    assert not eagerly
    captured.clear()
    with device.without_graphs():
        through_the_engine(bench, Batch((SMALL.prompt,)), 1)
    assert eagerly and all(shape.is_decode for shape in eagerly)
    assert captured and not any(shape.is_decode for shape in captured)


def test_a_device_without_graphs_has_nothing_to_be_compared_with(bench: Bench) -> None:
    with pytest.raises(BenchmarkError, match="captures no graphs"), bench.device.without_graphs():
        raise AssertionError("it began")


@pytest.mark.timeout(300)
def test_rows_that_begin_one_after_the_other_are_all_there_in_the_measured_steps() -> None:
    """More rows than may begin with one launch."""
    rows = 20
    with opened(TINY, engine_settings("cpu", rows, SMALL.context), SMALL.chained) as many:
        assert rows > many.engine.scheduler.limits.admissions
        batch = Batch((SMALL.prompt,) * rows)
        assert bare_graphs(many, batch, 1).step_ms > 0
        assert through_the_engine(many, batch, 1).step_ms > 0


def test_all_rows_are_there_in_the_measured_steps_where_enqueueing_takes_longer_than_the_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each turn of the loop finds the device idle and fills it up again, as a host that is slow to enqueue prompts."""
    rows = 128
    lengths = Workload(prompt=24, short=32, long=64, context=128, lengths=(), ragged=(8, 70))
    shape = replace(TINY, workload=lengths)
    waited = HoldingDevice.wait
    turns: list[int] = []

    def until_idle(
        self: HoldingDevice, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int
    ) -> None:
        waited(self, sampled, ended, wake_fds, timeout_s, in_tail)
        launched = many.engine.ledger.launched
        while self.ended() < launched:
            self._device.wait(launched, launched - 1, (), 10.0)
        turns.append(launched)

    monkeypatch.setattr(HoldingDevice, "wait", until_idle)
    with opened(shape, engine_settings("cpu", rows, lengths.context), lengths.chained) as many:
        batch = Batch((lengths.prompt,) * rows)
        assert bare_graphs(many, batch, 1).step_ms > 0
        assert turns[0] > 1, "the first turn filled the device up"
        admitted = many.engine.scheduler.limits.admissions
        submit(many, batch, lengths.long)
        before = many.engine.ledger.launched
        turn_until(many, lambda: decoding(many) == rows)
        assert many.engine.ledger.launched - before <= rows / admitted + RUN_AHEAD, "every launch brought rows"
        finish(many)
        many.front_end.check(rows, lengths.long)


def test_a_rows_prompt_is_its_own_the_same_in_every_run_and_begins_as_its_longer_ones_do() -> None:
    assert prompt_of(1, 8, 160).tolist() == prompt_of(1, 20, 160)[:8].tolist()
    assert prompt_of(1, 8, 160).tolist() != prompt_of(2, 8, 160).tolist()


def test_ragged_prompts_are_spread_over_the_lengths_and_are_not_in_order() -> None:
    lengths = ragged(128, 8192, 64)
    assert (min(lengths), max(lengths), len(lengths)) == (128, 8192, 64)
    assert list(lengths) != sorted(lengths)
    assert sorted(lengths)[1] == 256


def test_the_mean_context_of_a_batch_is_in_the_middle_of_the_measured_tokens() -> None:
    assert Batch((512,) * 8).context(FULL) == 512 + (32 + 288) / 2
    assert Batch((128, 8192)).context(FULL) == (128 + 8192) / 2 + 160
    assert Batch((512, 512)).blocks(FULL, 16) == 2 * 800 // 16
