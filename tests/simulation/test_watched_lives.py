"""A device that hangs ends the engine by its watchdog, one that is slow does not, on a clock that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runahead.runtime.watchdog import LaunchHungError, Watchdog
from tests.simulation.life import Broken
from tests.simulation.script import DEPTHS, Event, Kind
from tests.simulation.small import ask, counts_of

_look = Watchdog.check
Look = Callable[[Watchdog, int, tuple[int, ...], int, tuple[int, ...]], None]


def stalled() -> None:
    counts = counts_of((ask(0), ask(1)), Event(Kind.STALL, 0, tokens=3), launch_timeout_s=8.0)
    assert counts["hung launch found"] == 1 + len(DEPTHS)


def slow() -> None:
    asks = tuple(ask(handle) for handle in range(16))
    counts = counts_of(asks, turn_s=2**-6, pause_s=7.0, launch_timeout_s=8.0)
    assert counts["slow device waited for"] >= 1 + len(DEPTHS)
    assert counts["finished: LENGTH"] == 16 * (1 + len(DEPTHS))


def idle() -> None:
    """Requests come long after one another, their aborts before them; one just when its abort is forgotten."""
    aborts = (Event(Kind.ABORT, 1, turn=11), Event(Kind.ABORT, 2, turn=50))
    counts = counts_of((ask(0), ask(1, turn=40), ask(2, turn=80)), *aborts, turn_s=2.0, launch_timeout_s=64.0)
    assert counts["aborted before it came"] == counts["aborted too long before it came"] == 1 + len(DEPTHS)


def never(dog: Watchdog, in_flight: int, marks: tuple[int, ...], requests: int, work: tuple[int, ...]) -> None:
    pass


def too_soon(dog: Watchdog, in_flight: int, marks: tuple[int, ...], requests: int, work: tuple[int, ...]) -> None:
    now = dog._clock()
    if dog._marks.seconds(now, in_flight > 0, marks) > dog.limit_s / 2:
        raise LaunchHungError("too soon")


def too_late(dog: Watchdog, in_flight: int, marks: tuple[int, ...], requests: int, work: tuple[int, ...]) -> None:
    now = dog._clock()
    if dog._marks.seconds(now, in_flight > 0, marks) > 2 * dog.limit_s:
        raise LaunchHungError("too late")


def idle_time_too(dog: Watchdog, in_flight: int, marks: tuple[int, ...], requests: int, work: tuple[int, ...]) -> None:
    _look(dog, max(1, in_flight), marks, requests, work)


def test_a_stalled_device_is_found_out_at_every_depth() -> None:
    stalled()


def test_a_slow_device_is_waited_for_at_every_depth() -> None:
    slow()


def test_a_device_that_hangs_while_nobody_asks_anything_is_found_out_with_the_next_launch() -> None:
    counts = counts_of((ask(0), ask(1, turn=300)), Event(Kind.STALL, turn=200), launch_timeout_s=8.0)
    assert counts["hung launch found"] == counts["finished: LENGTH"] == 1 + len(DEPTHS)


def test_an_abort_is_forgotten_before_what_comes_too_long_after_it() -> None:
    idle()


@pytest.mark.parametrize(
    ("mistake", "life"),
    [(never, stalled), (too_late, stalled), (too_soon, stalled), (too_soon, slow), (idle_time_too, idle)],
)
def test_a_watchdog_that_sleeps_or_bites_the_wrong_one_is_seen(
    monkeypatch: pytest.MonkeyPatch, mistake: Look, life: Callable[[], None]
) -> None:
    monkeypatch.setattr(Watchdog, "check", mistake)
    with pytest.raises(Broken):
        life()
