"""A launch that never ends stops the engine; one that is only slow does not."""

from __future__ import annotations

from typing import Any

import pytest

from runahead.runtime.watchdog import LaunchHungError, NoProgressError, Watchdog
from tests.runtime.chain import make_chain


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def after(seconds: float, clock: Clock, watchdog: Watchdog, *figures: Any) -> None:
    """It looks each second, and the figures stay as they were."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        watchdog.check(*figures)
    clock.now += seconds % 1


def test_a_launch_that_never_ends_is_noticed_and_not_before_the_limit() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    watchdog.check(0, (0, 0), 0, ())
    after(1000.0, clock, watchdog, 0, (0, 0), 0, ())
    watchdog.check(0, (0, 0), 0, ())
    watchdog.check(1, (0, 0), 0, ())
    after(9.0, clock, watchdog, 1, (0, 0), 0, ())
    watchdog.check(2, (0, 0), 0, ())
    after(1.0, clock, watchdog, 2, (0, 0), 0, ())
    clock.now += 1.0
    with pytest.raises(LaunchHungError, match="2 launches are in flight and none has moved for 10 s"):
        watchdog.check(2, (0, 0), 0, ())


def test_requests_that_come_no_further_are_noticed_whatever_the_launches_do() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    for number in range(10):
        clock.now += 2.0
        watchdog.check(1, (number, number), 0, (7, 0))
    watchdog.check(1, (10, 10), 3, (7, 0))
    after(9.0, clock, watchdog, 1, (10, 10), 3, (7, 0))
    watchdog.check(1, (11, 11), 3, (7, 1))
    after(9.0, clock, watchdog, 1, (11, 11), 3, (7, 1))
    watchdog.check(1, (12, 12), 3, (7, 1))
    after(1.0, clock, watchdog, 1, (12, 12), 3, (7, 1))
    clock.now += 1.0
    with pytest.raises(NoProgressError, match="3 requests are served and none has come further for 10 s"):
        watchdog.check(1, (13, 13), 3, (7, 1))


def test_a_launch_that_hangs_is_no_lack_of_progress_though_the_last_mark_before_it_brought_no_token() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    watchdog.check(2, (1, 0), 3, (7, 0))
    clock.now += 0.1
    watchdog.check(2, (1, 1), 3, (7, 0))
    after(9.95, clock, watchdog, 2, (1, 1), 3, (7, 0))
    watchdog.check(2, (1, 1), 3, (7, 0))
    clock.now += 0.1
    with pytest.raises(LaunchHungError):
        watchdog.check(2, (1, 1), 3, (7, 0))


@pytest.mark.parametrize("marks", [(1, 0), (0, 1)])
def test_every_mark_starts_the_time_anew(marks: tuple[int, int]) -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    watchdog.check(2, (0, 0), 0, ())
    after(9.0, clock, watchdog, 2, (0, 0), 0, ())
    watchdog.check(2, marks, 0, ())
    after(9.0, clock, watchdog, 2, marks, 0, ())
    watchdog.check(2, marks, 0, ())
    after(1.0, clock, watchdog, 2, marks, 0, ())
    clock.now += 1.0
    with pytest.raises(LaunchHungError):
        watchdog.check(2, marks, 0, ())


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_an_engine_whose_device_has_stopped_raises(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    chain = make_chain(run_ahead, schedule=lambda: 0, clock=clock)
    chain.submit(1, [3, 4], max_tokens=20, ignore_eos=True)
    for _ in range(3):
        chain.turn()

    def hang(*_: object) -> None:
        clock.now += 50.0

    monkeypatch.setattr(chain.device, "wait", hang)
    with pytest.raises(LaunchHungError):
        for _ in range(10):
            chain.turn()


def test_requests_that_arrive_are_no_progress_of_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    chain = make_chain(2, schedule=lambda: 0, clock=clock)
    chain.submit(1, [3, 4], max_tokens=20, ignore_eos=True)
    monkeypatch.setattr(chain.engine.scheduler, "plan", lambda: None)
    monkeypatch.setattr(chain.engine, "_wait", lambda: None)
    with pytest.raises(NoProgressError):
        for handle in range(2, 60):
            clock.now += 5.0
            chain.submit(handle, [3, 4], max_tokens=20)
            chain.engine.turn()


def test_time_in_which_the_loop_was_stopped_is_no_standstill() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    watchdog.check(2, (0, 0), 3, (7, 0))
    for _ in range(5):
        clock.now += 1000.0
        watchdog.check(2, (0, 0), 3, (7, 0))
    after(3.0, clock, watchdog, 2, (0, 0), 3, (7, 0))
    with pytest.raises(LaunchHungError):
        after(1.0, clock, watchdog, 2, (0, 0), 3, (7, 0))
