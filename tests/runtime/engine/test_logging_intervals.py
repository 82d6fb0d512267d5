"""Logging every n launches: how many snapshots and barriers there are, and what they do to the chain."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from runahead.runtime.engine.figures import LogMode, Snapshot
from runahead.runtime.wire.figures import EngineStats
from tests.cuda_graphs.simulated_device import Schedule, seeded_schedule
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import completion

DEPTHS = [0, 1, 2, 4]
INTERVALS = [1, 2, 3, 7]
PROMPTS = {1: [3] * 40, 2: [4, 5], 3: [6] * 17}
ANSWERS = {handle: completion(prompt, handle, 30, stops=()) for handle, prompt in PROMPTS.items()}


class TickingClock:
    """Later at every look."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.125
        return self.now


@dataclass
class Logged:
    chain: Chain
    snapshots: list[Snapshot]

    @property
    def stats(self) -> EngineStats:
        return self.chain.engine.stats()


def make_logged(depth: int, interval: int, mode: LogMode, schedule: Schedule = no_step) -> Logged:
    snapshots: list[Snapshot] = []
    chain = make_chain(
        depth,
        schedule=schedule,
        clock=TickingClock(),
        log_interval=interval,
        log_mode=mode,
        write_snapshot=snapshots.append,
    )
    return Logged(chain, snapshots)


def ask_all(chain: Chain) -> None:
    for handle, prompt in PROMPTS.items():
        chain.submit(handle, prompt, seed=handle, max_tokens=30, ignore_eos=True)


def run_logged(depth: int, interval: int, mode: LogMode, schedule: Schedule = no_step) -> Logged:
    """Three requests at once on a device that does nothing until it is waited for."""
    logged = make_logged(depth, interval, mode, schedule)
    ask_all(logged.chain)
    logged.chain.run()
    return logged


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_n_launches_give_a_snapshot_for_each_whole_interval(depth: int, interval: int, mode: LogMode) -> None:
    logged = run_logged(depth, interval, mode)
    launches = logged.stats.launches_retired
    assert launches > 30
    assert [snapshot.launch for snapshot in logged.snapshots] == list(range(interval, launches + 1, interval))
    assert len(logged.snapshots) == launches // interval


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_barriers_for_logging_are_one_for_each_snapshot_and_none_in_the_mode_events(depth: int, interval: int) -> None:
    drained = run_logged(depth, interval, LogMode.BARRIER).stats
    assert drained.barriers == {"logging": drained.launches // interval}
    assert drained.barrier_s["logging"] > 0
    assert run_logged(depth, interval, LogMode.EVENTS).stats.barriers == {}


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("interval", [0, *INTERVALS])
@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_are_the_same_whatever_is_logged(depth: int, interval: int, mode: LogMode) -> None:
    for schedule in (no_step, seeded_schedule(interval)):
        logged = run_logged(depth, interval, mode, schedule)
        assert logged.chain.tokens() == ANSWERS
        logged.chain.check_nothing_is_left()
        assert len(logged.snapshots) == (logged.stats.launches // interval if interval else 0)


@pytest.mark.parametrize("interval", [2, 3, 7])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_launch_outside_a_barriers_window_is_overlapped(depth: int, interval: int) -> None:
    stats = run_logged(depth, interval, LogMode.BARRIER).stats
    drained = stats.launches // interval  # the logged launch itself, which nothing precedes on the device
    assert stats.firsts_after_idle == 1
    assert stats.overlapped == stats.launches_retired - 1 - drained
    assert 0 < stats.overlap_ratio < 1


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_in_the_mode_events_every_launch_is_overlapped(depth: int, interval: int) -> None:
    stats = run_logged(depth, interval, LogMode.EVENTS).stats
    assert stats.overlapped == stats.launches_retired - 1
    assert stats.overlap_ratio == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_barrier_before_every_launch_is_serial(depth: int) -> None:
    stats = run_logged(depth, 1, LogMode.BARRIER).stats
    assert (stats.overlapped, stats.overlap_ratio) == (0, 0)
    assert stats.launches_by_depth == {1: stats.launches}


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_time_in_a_snapshot_is_zero_and_none_is_negative(depth: int, interval: int, mode: LogMode) -> None:
    logged = run_logged(depth, interval, mode)
    times = [field.name for field in fields(Snapshot) if field.name.endswith("_s")]
    assert set(times) >= {"launch_s", "step_s", "host_s", "device_s"}
    for snapshot in logged.snapshots:
        for name in times:
            assert getattr(snapshot, name) > 0, f"{name} of launch {snapshot.launch}"


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_snapshots_count_every_launch_and_its_tokens_once(depth: int, interval: int, mode: LogMode) -> None:
    logged = run_logged(depth, interval, mode)
    covered = 0
    for snapshot in logged.snapshots:
        covered += snapshot.launches
        assert covered == snapshot.launch - (mode is LogMode.BARRIER and interval > 1)
    tokens = sum(snapshot.tokens for snapshot in logged.snapshots)
    launches_after = logged.stats.launches - covered
    assert 0 <= logged.stats.generated_tokens - tokens <= launches_after * len(PROMPTS)
    if not launches_after:
        assert tokens == sum(map(len, ANSWERS.values()))


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_device_time_of_a_snapshot_is_that_of_its_launches(depth: int, mode: LogMode) -> None:
    for snapshot in run_logged(depth, 3, mode).snapshots:
        # The simulated device's clock ticks at the start of S and at the end of F.
        assert snapshot.launch_s == pytest.approx(1e-9)
        assert snapshot.device_s == pytest.approx(1e-9)


@pytest.mark.parametrize("mode", LogMode)
@pytest.mark.parametrize("pause", [1, 5])
@pytest.mark.parametrize("depth", DEPTHS)
def test_idle_time_between_requests_makes_no_snapshot_and_no_barrier(depth: int, pause: int, mode: LogMode) -> None:
    logged = make_logged(depth, 4, mode)
    chain = logged.chain
    for handle in range(1, 14):
        chain.submit(handle, [handle, 4], seed=handle, max_tokens=4, ignore_eos=True)
        chain.run()
        for _ in range(pause):
            chain.turn()  # finds nothing to do, whether or not the next launch is one that is logged
    stats = logged.stats
    assert stats.firsts_after_idle == 13
    assert stats.launches == 13 * 5, "the loop is idle before launches that are logged and before others"
    assert stats.barriers.get("logging", 0) == (stats.launches // 4 if mode is LogMode.BARRIER else 0)
    assert [snapshot.launch for snapshot in logged.snapshots] == list(range(4, stats.launches + 1, 4))
    assert chain.tokens() == {h: completion([h, 4], h, 4, stops=()) for h in range(1, 14)}


@pytest.mark.parametrize("mode", LogMode)
def test_time_with_nothing_to_do_is_not_in_a_snapshot(mode: LogMode) -> None:
    """A clock on which only waiting for arrivals takes long."""
    logged = make_logged(2, 4, mode)
    chain, clock = logged.chain, logged.chain.engine._clock
    assert isinstance(clock, TickingClock)

    def long_wait(timeout_s: float) -> None:
        clock.now += 1e6

    chain.links.wait = long_wait  # type: ignore[method-assign]
    for handle in range(1, 8):
        chain.submit(handle, [handle, 4], max_tokens=5, ignore_eos=True)
        chain.run()
        chain.turn()
    assert clock.now > 7e6, "the engine had nothing to do seven times"
    assert len(logged.snapshots) >= 8
    assert all(0 < snapshot.step_s < 1e3 and 0 < snapshot.host_s < 1e3 for snapshot in logged.snapshots)
