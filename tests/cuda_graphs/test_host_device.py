"""The host device: launches in order on a thread of their own, with two marks each."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from cuda_graphs.device import DeviceError
from cuda_graphs.host_device import HostDevice, seeded_delays
from cuda_graphs.rings import RingLayout, allocate_rings
from cuda_graphs.shape import Form, LaunchShape

FAR = 1 << 62


class Recorder:
    """A program that writes down what it was called for, and can be held inside F."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.go = threading.Event()
        self.go.set()
        self.fail_at = 0

    def sample(self, shape: LaunchShape) -> None:
        self.calls.append(("S", shape.number))

    def apply(self, shape: LaunchShape) -> int:
        self.calls.append(("apply", shape.number))
        return 64

    def forward(self, shape: LaunchShape) -> None:
        assert self.go.wait(30)
        if shape.number == self.fail_at:
            raise ValueError("broken kernel")
        self.calls.append(("F", shape.number))

    def read_rows(self) -> Mapping[str, np.ndarray]:
        return {}


@pytest.fixture
def parts() -> Iterator[tuple[HostDevice, Recorder]]:
    program = Recorder()
    device = HostDevice(program, allocate_rings(RingLayout(4, 64, 64, 4, 1)), seeded_delays(3))
    yield device, program
    program.go.set()
    device.close()


def shape(number: int) -> LaunchShape:
    return LaunchShape(number, 1, Form.PLAIN, 1, 1, 1)


def wait_ended(device: HostDevice, number: int) -> None:
    while device.ended() < number:
        device.wait(FAR, device.ended(), (), 10)


def test_launches_run_in_order_each_s_apply_f(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    for number in range(1, 6):
        device.launch(shape(number))
    wait_ended(device, 5)
    assert program.calls == [(part, number) for number in range(1, 6) for part in ("S", "apply", "F")]
    assert device.counters.bytes_to_device == 5 * 64


def test_tokens_are_readable_while_f_runs(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.go.clear()
    device.launch(shape(1))
    device.wait(0, FAR, (), 10)
    assert device.sampled() == 1
    assert device.ended() == 0
    program.go.set()
    wait_ended(device, 1)


def test_stamps_are_in_order(parts: tuple[HostDevice, Recorder]) -> None:
    device, _ = parts
    device.launch(shape(1))
    device.launch(shape(2))
    wait_ended(device, 2)
    rings = device.rings
    assert rings.start_ns[1] <= rings.end_ns[1] <= rings.start_ns[2] <= rings.end_ns[2]


def test_an_arrival_ends_a_wait(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.go.clear()
    device.launch(shape(1))
    device.wait(0, FAR, (), 10)
    read, write = os.pipe()
    os.write(write, b"x")
    device.wait(1, FAR, (read,), 60)
    assert device.ended() == 0, "nothing but the descriptor can have ended this wait"
    os.close(read)
    os.close(write)
    program.go.set()


def test_a_launch_that_raises_reaches_the_host_as_a_device_error(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.fail_at = 2
    for number in (1, 2, 3):
        device.launch(shape(number))
    with pytest.raises(DeviceError, match="broken kernel"):
        wait_ended(device, 3)
    assert ("S", 3) not in program.calls


def test_close_leaves_no_thread() -> None:
    before = threading.active_count()
    device = HostDevice(Recorder(), allocate_rings(RingLayout(4, 64, 64, 4, 1)))
    device.launch(shape(1))
    device.close()
    assert threading.active_count() == before
