"""What becomes of an engine or a service when a figure fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.gpu_table import engines, parts
from benchmarks.gpu_table import found as found_module
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.decode import Batch, Steps, submit, through_the_engine
from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.measured import Measured
from benchmarks.gpu_table.parts import PARTS, run_part
from runahead.cuda_graphs.device import DeviceError


@dataclass
class Openings:
    """Opens numbers, one after the other. fail_at: openings that fail. is_as_opened: what it is asked for says."""

    fail_at: tuple[int, ...] = ()
    closing_fails: bool = False
    is_as_opened: bool = True
    opened: int = 0
    closed: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def one(self) -> Iterator[int]:
        self.opened += 1
        if (number := self.opened) in self.fail_at:
            raise DeviceError("no GPU any more")
        try:
            yield number
        finally:
            self.closed.append(number)
        if self.closing_fails:
            raise RuntimeError("it hangs")

    def measured(self) -> Measured[int]:
        return Measured(self.one, lambda number: self.is_as_opened)


def _raising(error: Exception) -> Callable[[int], int]:
    def measure(number: int) -> int:
        raise error

    return measure


def _number(opened: int) -> int:
    return opened


def test_what_a_failed_figure_leaves_as_it_was_is_kept_and_what_it_leaves_otherwise_is_opened_again() -> None:
    openings = Openings()
    with openings.measured() as measured:
        assert measured.measure(_raising(BenchmarkError("a row was missing"))) == (
            None,
            "BenchmarkError: a row was missing",
        )
        assert measured.measure(_number) == (1, "")
        openings.is_as_opened = False
        measured.measure(_raising(BenchmarkError("a request was refused")))
        assert openings.closed == [1], "closed at once: another engine may need its memory"
        assert measured.measure(_number) == (2, "")
    assert openings.closed == [1, 2]
    assert measured.failures == ["BenchmarkError: a row was missing", "BenchmarkError: a request was refused"]


@pytest.mark.parametrize("error", [DeviceError("a launch failed"), RuntimeError("out of memory"), OSError("gone")])
def test_after_any_other_failure_nothing_is_believed_and_it_is_opened_again(error: Exception) -> None:
    openings = Openings()
    with openings.measured() as measured:
        measured.measure(_raising(error))
        assert measured.measure(_number) == (2, "")


def test_what_can_not_be_opened_again_is_tried_once_and_every_figure_says_why_it_is_missing() -> None:
    openings = Openings(fail_at=(2,))
    with openings.measured() as measured:
        measured.measure(_raising(DeviceError("a launch failed")))
        for _ in range(2):
            assert measured.measure(_number) == (
                None,
                "after a failure it could not be opened again: DeviceError: no GPU any more",
            )
    assert openings.opened == 2
    assert measured.failures == [
        "DeviceError: a launch failed",
        "it could not be opened again: DeviceError: no GPU any more",
    ]


def test_a_closing_that_fails_is_named_and_loses_no_figure() -> None:
    openings = Openings(closing_fails=True)
    with openings.measured() as measured:
        assert measured.measure(_number) == (1, "")
    assert measured.failures == ["while it was closed: RuntimeError: it hangs"]


def test_a_mistake_of_the_benchmark_itself_is_no_missing_figure() -> None:
    openings = Openings()
    with pytest.raises(KeyError), openings.measured() as measured:
        measured.measure(_raising(KeyError("a typing error")))
    assert openings.closed == [1]


def test_a_part_goes_on_with_a_new_engine_where_a_figure_has_left_requests_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benches: list[Bench] = []
    original = engines.opened

    @contextlib.contextmanager
    def noting(*arguments: Any) -> Iterator[Bench]:
        with original(*arguments) as bench:
            benches.append(bench)
            yield bench

    def fails_once(bench: Bench, batch: Batch, repeats: int) -> Steps:
        if len(figures) == 1:
            figures.append(None)
            submit(bench, batch, 8)
            bench.engine.turn()
            raise BenchmarkError("it was too hot")
        figures.append(through_the_engine(bench, batch, repeats))
        return figures[-1]

    figures: list[Any] = []
    monkeypatch.setattr(found_module, "opened", noting)
    monkeypatch.setattr(parts, "through_the_engine", fails_once)
    found = run_part(PARTS["lengths-tiny"], Run("cpu", 1, 300.0, "0123456789ab"))
    assert [cell.step_ms is None for cell in found.cells] == [False, True, False, False, False]
    assert found.failure == "BenchmarkError: it was too hot"
    assert len(benches) == 2 and len(benches[0].engine.registry) and benches[1].is_as_opened
    cached = [bench.engine.stats().cached_tokens for bench in benches]
    assert cached[1] > 0, "the new engine's prompts are in its cache, too"
