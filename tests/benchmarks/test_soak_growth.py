"""Growth of processes during a soak: the slope of their memory, and what a sample sees."""

from __future__ import annotations

import math
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import report
from benchmarks.soak.growth import MIB, Growth, Sample, Series, growth, of_session, sample_of
from benchmarks.soak.run import Soak
from benchmarks.soak.world import World


def test_growth_is_measured_of_processes_that_had_warmed_up() -> None:
    soak = Soak(World(seed=1), seconds=120.0, canaries=100)
    soak.series["early", 1] = Series("early", 1, samples(9.0)[30:])
    soak.series["late", 2] = Series("late", 2, samples(9.0)[31:])
    lines = {line.split(",")[0]: line for line in report(soak).text().splitlines()}
    assert "second half +9.00 ± 0.00 MiB/min" in lines["memory of early"]
    assert "second half" not in lines["memory of late"]


def samples(mib_a_minute: float, *, seconds: int = 120, noise: float = 0.0) -> list[Sample]:
    return [
        Sample(float(at), round((100 + mib_a_minute * at / 60 + noise * (-1) ** at) * MIB), 5, 10)
        for at in range(seconds)
    ]


def test_growth_is_the_slope_of_the_straight_line_that_fits_best() -> None:
    for grows in (0.0, 9.0):
        exact, noisy = growth(samples(grows)), growth(samples(grows, noise=2.0))
        assert exact is not None and exact.slope == pytest.approx(grows, abs=1e-3) and exact.error < 1e-3
        assert noisy is not None and noisy.slope == pytest.approx(grows, abs=0.1)
    assert growth(samples(9.0, seconds=2)) is growth([]) is None


def in_waves(mib_a_minute: float) -> list[Sample]:
    """Waves of 40 s and 8 MiB, of which there is no whole number."""
    return [
        replace(
            sample, resident_bytes=sample.resident_bytes - round(8 * MIB * math.sin(2 * math.pi * sample.at_s / 40))
        )
        for sample in samples(mib_a_minute, seconds=310)
    ]


def test_memory_that_comes_and_goes_in_waves_is_no_growth_and_hides_none() -> None:
    flat, leak = growth(in_waves(0.9)), growth(in_waves(6.0))
    assert flat is not None and flat.slope > 1.0 and flat.is_below(1.0)
    assert leak is not None and not leak.is_below(1.0)


def test_growth_above_the_goal_is_wrong_by_two_standard_errors() -> None:
    assert Growth(1.9, 0.5).is_below(1.0) and not Growth(2.1, 0.5).is_below(1.0)
    assert Growth(0.99, 0.0).is_below(1.0) and not Growth(1.0, 0.0).is_below(1.0)


def test_a_sample_sees_the_threads_and_descriptors_of_a_process(tmp_path: Path) -> None:
    before, end = sample_of(os.getpid(), 0.0), threading.Event()
    thread = threading.Thread(target=end.wait)
    with (tmp_path / "file").open("w"):
        thread.start()
        during = sample_of(os.getpid(), 1.0)
    end.set()
    thread.join()
    assert before and during and during.resident_bytes > MIB
    assert (during.threads, during.descriptors) == (before.threads + 1, before.descriptors + 1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert sample_of(gone.pid, 0.0) is None


def test_a_process_that_has_ended_and_that_nobody_has_asked_for_is_still_one_of_its_session() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert of_session(process.pid) == {process.pid}
    process.wait()
    assert of_session(process.pid) == set()
