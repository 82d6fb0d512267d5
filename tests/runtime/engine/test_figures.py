"""The figures say what happened: idle time from stamps, firsts only after real idleness, wasted rows."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.engine.figures import Figures, Recorder, kind_of
from runahead.runtime.scheduler.ledger import Launch
from tests.runtime.chain import make_chain, no_step
from tests.runtime.programs.hash_model import EOS, completion

DEPTHS = [0, 1, 2, 3, 4]
_SLOTS, _EPOCHS = np.zeros(1, np.int32), np.zeros(1, np.int64)
_FLAGS = np.ones(1, np.bool_)


def launch(number: int, *, overlapped: bool = False, first: bool = False) -> Launch:
    shape = LaunchShape(number, 1, Form.PLAIN, 1, 1, is_decode=True)
    return Launch(shape, _SLOTS, _EPOCHS, _FLAGS, _SLOTS, _EPOCHS, _FLAGS, overlapped=overlapped, first=first)


def retired(*spans: tuple[int, int], firsts: tuple[int, ...] = (1,)) -> Figures:
    """Figures of launches that ran from start to end, in ns, numbered from 1."""
    figures, rings = Figures(), allocate_rings(RingLayout(4, 64, 64, 1, 1))
    for number, (start, end) in enumerate(spans, start=1):
        rings.start_ns[rings.slot(number)], rings.end_ns[rings.slot(number)] = start, end
        figures.retire(launch(number, first=number in firsts), rings, rings.slot(number))
    return figures


def test_idle_time_is_the_sum_of_the_gaps_between_one_end_and_the_next_start() -> None:
    figures = retired((100, 200), (230, 300), (300, 350), (355, 360))
    assert figures.idle_ns == 30 + 0 + 5
    assert figures.busy_ns == 100 + 70 + 50 + 5


def test_idle_time_inside_launches_is_counted_apart_and_stays_busy_time() -> None:
    figures, rings = Figures(), allocate_rings(RingLayout(4, 64, 64, 1, 1))
    rings.start_ns[:], rings.end_ns[:] = (100, 200, 300, 400), (150, 280, 390, 490)
    rings.idle_ns[:] = (0, 30, 0, 5)
    for number in (1, 2, 3):
        figures.retire(launch(number, first=number == 1), rings, rings.slot(number))
    assert (figures.busy_ns, figures.idle_inside_ns, figures.idle_ns) == (80 + 90 + 90, 30 + 5, 20 + 10)


def test_no_launch_is_idle_inside_for_longer_than_it_takes_whatever_the_hosts_clock_says() -> None:
    figures, recorder, rings = Figures(), Recorder(), allocate_rings(RingLayout(4, 64, 64, 1, 1))
    rings.start_ns[:], rings.end_ns[:] = (100, 200, 300, 400), (150, 280, 390, 490)
    rings.idle_ns[:] = (0, 800, 90, 0)
    for number in (1, 2):
        figures.retire(launch(number, first=number == 1), rings, rings.slot(number))
        recorder.enqueued(number, 0.0, 0.0, 0.0, 0.0)
        recorder.committed(number, 0.0, 0.0, 0.0)
        recorder.retired(launch(number), 0.0, rings, rings.slot(number))
    assert (figures.busy_ns, figures.idle_inside_ns) == (80 + 90, 80 + 90)
    assert [each.idle_inside_ns for each in recorder.trace(2).launches] == [80, 90]


def test_time_without_work_is_not_idle_time() -> None:
    assert retired((100, 200), (5000, 5100), (5107, 5200), firsts=(1, 2)).idle_ns == 7


def test_stamps_that_cross_by_a_clocks_grain_do_not_count_against_idle_time() -> None:
    assert retired((100, 200), (199, 300), (310, 320)).idle_ns == 10


def test_the_overlap_ratio_is_over_launches_that_had_one_before_them() -> None:
    figures, rings = Figures(), allocate_rings(RingLayout(4, 64, 64, 1, 1))
    assert figures.overlap_ratio == 0.0
    for number in range(1, 6):
        figures.retire(launch(number, first=number == 1, overlapped=number in (2, 3, 5)), rings, rings.slot(number))
    assert figures.overlap_ratio == 3 / 4


@pytest.mark.parametrize(
    ("rows", "tokens", "is_decode", "kind"),
    [(0, 0, False, "closing"), (3, 3, True, "decode"), (3, 9, False, "mixed"), (3, 9, True, "decode")],
    ids=["no rows", "one token each", "a chunk", "two drafts each"],
)
def test_kinds_of_launches(rows: int, tokens: int, is_decode: bool, kind: str) -> None:
    assert kind_of(LaunchShape(1, 1, Form.PLAIN, rows, tokens, is_decode)) == kind


# ---------------------------------------------------------------- what the chain counts


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_start_after_idleness_is_a_first_and_no_other(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    for handle in (1, 2, 3):
        chain.submit(handle, [3, 4], max_tokens=10, ignore_eos=True)
        chain.run()
        chain.turn()  # finds nothing to do
    assert chain.engine.stats().firsts_after_idle == 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_backlog_behind_one_row_is_no_idleness(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, max_rows=1)
    for handle in range(1, 30):
        chain.submit(handle, [3, 4], max_tokens=2, ignore_eos=True)
    chain.run()
    assert chain.engine.stats().firsts_after_idle == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_idle_and_busy_time_come_from_the_devices_stamps(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3, 4], max_tokens=20, ignore_eos=True)
    chain.run()
    stats = chain.engine.stats()
    # The simulated device's clock ticks once for S and once for F, and never in between.
    assert stats.device_busy_s == pytest.approx(stats.launches_retired * 1e-9)
    assert stats.device_idle_s == pytest.approx((stats.launches_retired - 1) * 1e-9)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_device_that_is_always_done_before_the_host_overlaps_nothing(depth: int) -> None:
    chain = make_chain(depth)  # everything enqueued runs whenever the host looks
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    chain.run()
    assert chain.engine.stats().overlap_ratio == 0.0


def prompt_that_ends_early() -> list[int]:
    for first in range(2, 97):
        if 3 <= len(completion([first, 4], 0, 40)) < 20:
            return [first, 4]
    raise AssertionError("the hash model has no such prompt")


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_that_could_not_be_known_wastes_one_row_in_each_launch_in_flight(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, prompt_that_ends_early(), max_tokens=40)
    chain.run()
    assert chain.tokens()[1][-1] == EOS
    assert chain.engine.stats().void_rows == max(depth, 1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_at_max_tokens_wastes_nothing(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3, 4], max_tokens=20, ignore_eos=True)
    chain.run()
    assert chain.engine.stats().void_rows == 0
