"""What a snapshot says of the launches between it and the one before."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.runtime.engine.figures import IntervalLog, LogMode, Snapshot, Totals
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.wire.prompts import Content

ROWS = 3


def launch(number: int) -> Launch:
    slots, epochs, flags = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int64), np.ones(ROWS, np.bool_)
    return Launch(LaunchShape(number, ROWS, Form.PLAIN, ROWS, ROWS, True), slots, epochs, flags, slots, epochs, flags)


def totals(launch: int) -> Totals:
    """As if every launch had brought 3 tokens, 2 of them drafts, and taken 2 s on the engine's clock, half of it the
    host's work, and on the device 0.75 s and 0.5 s before it."""
    drafted, accepted = launch * np.array([4, 3]), launch * np.array([2, 0])
    return Totals(launch, 3 * launch, drafted, accepted, 2.0 * launch, 1.0 * launch, 0.75 * launch, 0.5 * launch)


def pool() -> BlockPool:
    """4 free, 1 cached, 2 owned, 3 fenced."""
    pool = BlockPool(11, 16)
    cached, *others = pool.allocate(6)
    pool.make_findable(cached, Content(b"key", b"tokens"))
    pool.fence([cached])
    pool.release([cached])
    pool.fence(others[:3])
    return pool


def logged(interval: int, mode: LogMode, launches: int) -> list[Snapshot]:
    """The snapshots of so many launches, each retired before the next is planned."""
    snapshots: list[Snapshot] = []
    log = IntervalLog(interval, mode, snapshots.append, totals(0))
    for number in range(1, launches + 1):
        if log.drains_before(number):
            log.drained(totals(number - 1))
        if log.is_logged(number):
            log.retired(launch(number), 0.7, totals(number), pool())
    return snapshots


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("interval", [1, 2, 3, 7, 10])
def test_one_launch_in_every_interval_is_logged(interval: int, mode: LogMode) -> None:
    for launches in (0, 1, interval - 1, interval, 10 * interval - 1, 10 * interval):
        numbers = [snapshot.launch for snapshot in logged(interval, mode, launches)]
        assert numbers == [interval * k for k in range(1, launches // interval + 1)]


@pytest.mark.parametrize("mode", LogMode)
def test_without_an_interval_nothing_is_logged(mode: LogMode) -> None:
    assert logged(0, mode, 50) == []


def test_the_chain_drains_before_logged_launches_in_one_mode_and_never_in_the_other() -> None:
    barrier = IntervalLog(4, LogMode.BARRIER, lambda _: None, totals(0))
    events = IntervalLog(4, LogMode.EVENTS, lambda _: None, totals(0))
    assert [number for number in range(1, 14) if barrier.drains_before(number)] == [4, 8, 12]
    assert [number for number in range(1, 14) if events.drains_before(number)] == []


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_snapshots_cover_every_launch_once(interval: int) -> None:
    for mode in LogMode:
        snapshots = logged(interval, mode, 6 * interval)
        covered = np.cumsum([snapshot.launches for snapshot in snapshots]).tolist()
        # A barrier stands before the logged launch, which belongs to the next interval. Where every launch is logged
        # there is nothing between two of them, and each snapshot is of its own launch.
        behind = 1 if mode is LogMode.BARRIER and interval > 1 else 0
        assert covered == [snapshot.launch - behind for snapshot in snapshots]
        assert all(snapshot.tokens == 3 * snapshot.launches for snapshot in snapshots)


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_drafts_are_those_of_the_launches_between_two_snapshots_by_their_place(interval: int, mode: LogMode) -> None:
    for snapshot in logged(interval, mode, 6 * interval):
        assert snapshot.drafted == (4 * snapshot.launches, 3 * snapshot.launches)
        assert snapshot.accepted == (2 * snapshot.launches, 0)
        assert snapshot.tokens_per_launch == 3.0, "of three tokens one was no draft"


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize(("mode", "step_s"), [(LogMode.EVENTS, 1.25), (LogMode.BARRIER, 2.0)])
def test_times_are_those_of_one_launch_on_average(interval: int, mode: LogMode, step_s: float) -> None:
    """The step is the device's own in the mode that stops nothing, and the engine's where the chain is drained."""
    for snapshot in logged(interval, mode, 4 * interval):
        assert snapshot.step_s == pytest.approx(step_s)
        assert snapshot.host_s == pytest.approx(1.0)
        assert snapshot.device_s == pytest.approx(0.75)
        assert snapshot.launch_s == 0.7


def test_a_snapshot_shows_the_logged_launchs_rows_and_where_every_block_is() -> None:
    (snapshot,) = logged(3, LogMode.EVENTS, 3)
    assert snapshot.rows == ROWS
    places = (snapshot.blocks_free, snapshot.blocks_cached, snapshot.blocks_owned, snapshot.blocks_fenced)
    assert places == (4, 1, 2, 3)
