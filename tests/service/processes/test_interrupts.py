"""Children of the supervisor begin with a terminal's signals blocked, and the supervisor does not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from runahead.service.processes.interrupts import OF_A_TERMINAL, blocked_interrupts

PROGRAM = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"


def is_blocked(number: signal.Signals = signal.SIGINT) -> bool:
    return number in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_is_started_inside_begins_with_interrupts_blocked() -> None:
    with blocked_interrupts():
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {str(int(number)) for number in OF_A_TERMINAL}
    assert not any(map(is_blocked, OF_A_TERMINAL))


@pytest.mark.parametrize("first", [0, 1])
def test_interrupts_are_not_blocked_after_the_last_of_several(first: int) -> None:
    several = blocked_interrupts(), blocked_interrupts()
    for one in several:
        one.__enter__()
    assert is_blocked()
    several[first].__exit__(None, None, None)
    several[1 - first].__exit__(None, None, None)
    assert not is_blocked()


def test_interrupts_that_were_blocked_before_stay_so() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        with blocked_interrupts():
            assert all(map(is_blocked, OF_A_TERMINAL))
        assert is_blocked() and not is_blocked(signal.SIGHUP)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
