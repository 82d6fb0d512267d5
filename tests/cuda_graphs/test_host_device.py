"""The host device: launches in order on a thread of their own, with two marks each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from runahead.cuda_graphs.device import DeviceError, Form, LaunchShape
from runahead.cuda_graphs.host_device import HostDevice, seeded_delays
from runahead.cuda_graphs.rings import RingLayout, allocate_rings

FAR = 1 << 62
PARTS = ("S", "apply", "F")


class Recorder:
    """A program that writes down what it has done, can be held before each of its parts, and can fail in one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.entered = {part: threading.Event() for part in PARTS}
        self.go = {part: threading.Event() for part in PARTS}
        self.fail_in: tuple[str, int] | None = None
        self.release()

    def hold(self, part: str) -> None:
        self.entered[part].clear()
        self.go[part].clear()

    def release(self) -> None:
        for event in self.go.values():
            event.set()

    def sample(self, shape: LaunchShape) -> None:
        self._do("S", shape.number)

    def apply(self, shape: LaunchShape) -> int:
        self._do("apply", shape.number)
        return 64

    def forward(self, shape: LaunchShape) -> None:
        self._do("F", shape.number)

    def _do(self, part: str, number: int) -> None:
        self.entered[part].set()
        assert self.go[part].wait(30)
        if (part, number) == self.fail_in:
            raise ValueError(f"broken kernel in {part}")
        self.calls.append((part, number))

    def read_rows(self) -> Mapping[str, np.ndarray]:
        return {}


@pytest.fixture
def parts() -> Iterator[tuple[HostDevice, Recorder]]:
    program = Recorder()
    device = HostDevice(program, allocate_rings(RingLayout(4, 64, 64, 4, 1)), seeded_delays(3))
    yield device, program
    program.release()
    device.close()


def shape(number: int) -> LaunchShape:
    return LaunchShape(number, 1, Form.PLAIN, 1, 1, is_decode=True)


def wait_ended(device: HostDevice, number: int) -> None:
    while device.ended() < number:
        device.wait(FAR, device.ended(), (), 10)


def test_launches_run_in_order_each_s_apply_f(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    for number in range(1, 6):
        device.launch(shape(number))
    wait_ended(device, 5)
    assert program.calls == [(part, number) for number in range(1, 6) for part in PARTS]
    assert device.counters.bytes_to_device == 5 * 64


def test_tokens_are_readable_while_f_runs(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.hold("F")
    device.launch(shape(1))
    device.wait(0, FAR, (), 10)
    assert device.sampled() == 1
    assert device.ended() == 0
    program.release()
    wait_ended(device, 1)


@pytest.mark.parametrize(("late_tail", "in_tail"), [(False, 1), (True, 0)])
def test_a_launch_is_in_its_tail_once_it_is_sampled_or_late_when_apply_has_run(late_tail: bool, in_tail: int) -> None:
    program = Recorder()
    device = HostDevice(program, allocate_rings(RingLayout(4, 64, 64, 4, 1)), late_tail=late_tail)
    for part in ("apply", "F"):
        program.hold(part)
    device.launch(shape(1))
    device.wait(0, FAR, (), 10)
    assert (device.sampled(), device.in_tail()) == (1, in_tail)
    program.go["apply"].set()
    device.wait(FAR, FAR, (), 10, in_tail=0)
    assert (device.in_tail(), device.ended()) == (1, 0)
    program.release()
    wait_ended(device, 1)
    device.close()


def test_stamps_are_in_order(parts: tuple[HostDevice, Recorder]) -> None:
    device, _ = parts
    device.launch(shape(1))
    device.launch(shape(2))
    wait_ended(device, 2)
    rings = device.rings
    assert rings.start_ns[1] <= rings.end_ns[1] <= rings.start_ns[2] <= rings.end_ns[2]


def test_a_stall_between_the_parts_of_a_launch_is_idle_time_inside_it_though_its_ends_say_busy() -> None:
    now = 0

    def delayed() -> None:
        nonlocal now
        now += 1000

    class Slow(Recorder):
        def _do(self, part: str, number: int) -> None:
            nonlocal now
            now += {"S": 5, "apply": 7, "F": 40}[part]

    rings = allocate_rings(RingLayout(4, 64, 64, 4, 1))
    device = HostDevice(Slow(), rings, delayed, clock=lambda: now)
    for number in (1, 2):
        device.launch(shape(number))
    wait_ended(device, 2)
    device.close()
    assert (rings.end_ns - rings.start_ns)[1:3].tolist() == [2052, 2052]
    assert rings.idle_ns[1:3].tolist() == [2000, 2000], "before apply and before F; before S is between launches"


def test_an_arrival_ends_a_wait(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.hold("F")
    device.launch(shape(1))
    device.wait(0, FAR, (), 10)
    read, write = os.pipe()
    os.write(write, b"x")
    device.wait(1, FAR, (read,), 60)
    assert device.ended() == 0, "nothing but the descriptor can have ended this wait"
    os.close(read)
    os.close(write)
    program.release()


def test_a_launch_counts_as_sampled_when_its_s_has_run_and_not_before(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.hold("S")
    device.launch(shape(1))
    assert program.entered["S"].wait(30)
    assert device.sampled() == 0, "S runs, and its tokens are not there yet"
    program.release()
    device.wait(0, FAR, (), 10)
    assert device.sampled() == 1
    assert program.calls[0] == ("S", 1)
    wait_ended(device, 1)


@pytest.mark.parametrize("part", ["apply", "F"])
def test_a_launch_has_ended_when_its_f_has_run_and_not_before(parts: tuple[HostDevice, Recorder], part: str) -> None:
    device, program = parts
    program.hold(part)
    device.launch(shape(1))
    assert program.entered[part].wait(30)
    assert (device.sampled(), device.ended()) == (1, 0)
    program.release()
    wait_ended(device, 1)
    assert program.calls[-1] == ("F", 1)


def test_a_launch_behind_one_that_runs_waits_its_turn(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.hold("F")
    device.launch(shape(1))
    device.launch(shape(2))
    assert program.entered["F"].wait(30)
    assert device.sampled() == 1
    assert ("S", 2) not in program.calls
    program.release()
    wait_ended(device, 2)


@pytest.mark.parametrize("part", PARTS)
def test_a_launch_that_raises_reaches_the_host_as_a_device_error(parts: tuple[HostDevice, Recorder], part: str) -> None:
    device, program = parts
    program.fail_in = (part, 2)
    for number in (1, 2, 3):
        device.launch(shape(number))
    with pytest.raises(DeviceError, match=f"broken kernel in {part}"):
        wait_ended(device, 3)
    with pytest.raises(DeviceError):
        device.sampled()
    before = PARTS[: PARTS.index(part)]
    assert program.calls == [(done, 1) for done in PARTS] + [(done, 2) for done in before]


def test_a_launch_that_raises_wakes_a_host_that_waits(parts: tuple[HostDevice, Recorder]) -> None:
    device, program = parts
    program.hold("S")
    program.fail_in = ("S", 1)
    device.launch(shape(1))
    assert program.entered["S"].wait(30)
    threading.Timer(0.05, program.release).start()
    begun = time.monotonic()
    device.wait(0, 0, (), 30)
    assert time.monotonic() - begun < 20, "the wait ran out"
    with pytest.raises(DeviceError, match="broken kernel in S"):
        device.ended()


def test_close_leaves_no_thread() -> None:
    before = threading.active_count()
    device = HostDevice(Recorder(), allocate_rings(RingLayout(4, 64, 64, 4, 1)))
    device.launch(shape(1))
    device.close()
    assert threading.active_count() == before
