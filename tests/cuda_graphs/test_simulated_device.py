"""The simulated device: the same order and the same marks, step by step on the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from runahead.cuda_graphs.device import DeviceError, Form, LaunchShape
from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from tests.cuda_graphs.simulated_device import Schedule, SimulatedDevice, at_once, seeded_schedule

FAR = 1 << 62


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def sample(self, shape: LaunchShape) -> None:
        self.calls.append(("S", shape.number))

    def apply(self, shape: LaunchShape) -> int:
        self.calls.append(("apply", shape.number))
        return 64

    def forward(self, shape: LaunchShape) -> None:
        self.calls.append(("F", shape.number))

    def read_rows(self) -> Mapping[str, np.ndarray]:
        return {}


def make(schedule: Schedule, launches: int = 3) -> tuple[SimulatedDevice, Recorder]:
    program = Recorder()
    device = SimulatedDevice(program, allocate_rings(RingLayout(4, 64, 64, 4, 1)), schedule)
    for number in range(1, launches + 1):
        device.launch(LaunchShape(number, 1, Form.PLAIN, 1, 1, is_decode=True))
    return device, program


@pytest.mark.parametrize("schedule", [at_once, lambda: 1, seeded_schedule(1)], ids=["at once", "one by one", "seeded"])
def test_launches_run_in_order_each_s_apply_f(schedule: Schedule) -> None:
    device, program = make(schedule)
    while device.ended() < 3:
        pass
    assert program.calls == [(part, number) for number in (1, 2, 3) for part in ("S", "apply", "F")]
    assert device.counters.bytes_to_device == 3 * 64


def test_a_mark_follows_what_it_stands_for() -> None:
    device, program = make(lambda: 1)
    assert device.sampled() == 1
    assert program.calls == [("S", 1)]
    assert device.ended() == 1
    assert program.calls == [("S", 1), ("apply", 1), ("F", 1)]


def test_a_wait_runs_until_its_mark_and_no_further() -> None:
    device, program = make(lambda: 0)
    device.wait(1, FAR, (), 10)
    assert program.calls[-1] == ("S", 2)
    device.wait(FAR, 1, (), 10)
    assert program.calls[-1] == ("F", 2)
    assert device.counters.waits == 2


def test_stamps_are_in_order() -> None:
    device, _ = make(at_once)
    assert device.ended() == 3
    rings = device.rings
    stamps = [stamp for slot in (1, 2, 3) for stamp in (int(rings.start_ns[slot]), int(rings.end_ns[slot]))]
    assert stamps == sorted(stamps)


def test_a_failure_shows_at_the_next_look() -> None:
    device, program = make(lambda: 0)
    device.fail(ValueError("an illegal address"))
    for look in (device.sampled, device.ended, lambda: device.wait(0, 0, (), 10)):
        with pytest.raises(DeviceError, match="an illegal address"):
            look()
    assert program.calls == []
