"""Rank 0's device over the others' marks, and how a rank follows launches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from runahead.cuda_graphs.device import DeviceError, LaunchShape
from runahead.cuda_graphs.host_device import HostDevice
from runahead.cuda_graphs.rings import FAULT_PLAN_NUMBER, STATUS_FAULT, RingLayout, RingMemory
from runahead.runtime.plan import LaunchPlan, shape_of, stage
from runahead.runtime.ranks.rank_loop import follow_launches
from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.ranks.segment import (
    ENDED,
    FAULT,
    FAULT_PEER,
    LAUNCHED,
    Segment,
    SegmentLayout,
    make_memory,
    map_memory,
    segment_bytes,
)

RINGS = RingLayout(4, 64, 64, 4, 4)
LAYOUT = SegmentLayout(2, RINGS, 64)


class Launches:
    """A program that notes which launches it runs, and waits before it ends them. finite: of each row."""

    def __init__(self, rings: RingMemory, finite: int = 1) -> None:
        self.rings, self.finite = rings, finite
        self.seen: list[int] = []
        self.may_end = threading.Semaphore(0)
        self.fault = 0

    def sample(self, shape: LaunchShape) -> None:
        self.seen.append(shape.number)

    def apply(self, shape: LaunchShape) -> int:
        self.rings.status[self.rings.slot(shape.number), STATUS_FAULT] = self.fault
        return 0

    def forward(self, shape: LaunchShape) -> None:
        assert self.may_end.acquire(timeout=30.0)
        self.rings.finite[self.rings.slot(shape.number)] = self.finite

    def read_rows(self) -> dict[str, np.ndarray]:
        return {}


class Followers:
    """lost: as `Followers.lost` says it."""

    def __init__(self) -> None:
        self.ended, self.tell = os.pipe()
        self.said = ""
        self.closed = 0

    def sentinels(self) -> Sequence[int]:
        return (self.ended,)

    def lost(self) -> str:
        return self.said

    def close(self) -> None:
        self.closed += 1


class TwoRanks:
    """Rank 0's device, and rank 1's program, which follows on a thread. failed: why it does no more."""

    def __init__(self, launched: int = 0, finite: int = 1) -> None:
        memory = memoryview(bytearray(segment_bytes(LAYOUT)))
        self.segment = Segment(LAYOUT, memory, launched)
        self.segment.begin()
        self.followers, self.failed = Followers(), list[str]()
        self.first, self.second = Launches(self.segment.rings(0)), Launches(self.segment.rings(1), finite)
        own = HostDevice(self.first, self.first.rings, launched=launched, marks=self.segment.marks(0))
        self.device = RankedDevice(own, self.segment, self.followers, launched)
        self.other = HostDevice(self.second, self.second.rings, launched=launched, marks=self.segment.marks(1))
        self._launched = launched
        self.looked = threading.Semaphore(0)  # released at each pause between two looks for launches
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        try:
            follow_launches(self.other, self.segment, 1, self._launched, self._sleep)
        except DeviceError as error:
            self.failed.append(str(error))

    def _sleep(self, seconds: float) -> None:
        self.looked.release()
        threading.Event().wait(seconds)

    def launch(self, number: int, staged_as: int | None = None) -> None:
        rows = np.arange(2, dtype=np.int32)
        plan = LaunchPlan(staged_as or number, rows, np.ones(2, bool), True, np.zeros((0, 3), np.int32))
        slot = self.device.rings.slot(number)
        stage(plan, self.device.rings.plan[slot], self.device.rings.bulk[slot])
        self.device.launch(shape_of(self.device.rings.plan[slot])._replace(number=number))

    def close(self) -> None:
        for program in (self.first, self.second):
            program.may_end.release(100)
        self.segment.abort()
        self.thread.join(30.0)
        self.other.close()
        self.device.close()


@pytest.fixture
def ranks() -> Iterator[TwoRanks]:
    two = TwoRanks()
    yield two
    two.close()


def test_a_launch_has_ended_when_it_has_on_every_rank(ranks: TwoRanks) -> None:
    ranks.launch(1)
    ranks.launch(2)
    ranks.first.may_end.release(2)
    ranks.device.wait(1, 1 << 62, (), 0.3)  # rank 0 has sampled launch 2, and rank 1 has not ended launch 1
    assert ranks.device.ended() == 0
    ranks.second.may_end.release()
    ranks.device.wait(1 << 62, 0, (), 30.0)
    assert ranks.device.ended() == 1
    ranks.second.may_end.release()
    ranks.device.wait(1 << 62, 1, (), 30.0)
    assert ranks.device.ended() == 2
    assert ranks.second.seen == [1, 2]


def test_a_launch_is_in_its_tail_when_it_is_on_every_rank(ranks: TwoRanks) -> None:
    """The second rank can't sample launch 2 before it has ended launch 1."""
    ranks.launch(1)
    ranks.launch(2)
    ranks.device.wait(1 << 62, 1 << 62, (), 30.0, in_tail=0)
    assert ranks.device.in_tail() == 1
    ranks.first.may_end.release()
    ranks.device.wait(1 << 62, 1 << 62, (), 0.3, in_tail=1)
    assert (ranks.device.sampled(), ranks.device.in_tail()) == (2, 1)
    ranks.second.may_end.release()
    ranks.device.wait(1 << 62, 1 << 62, (), 30.0, in_tail=1)
    assert ranks.device.in_tail() == 2
    ranks.first.may_end.release()
    ranks.second.may_end.release()


def test_a_descriptor_wakes_a_wait_for_another_rank(ranks: TwoRanks) -> None:
    ranks.launch(1)
    ranks.first.may_end.release()
    ranks.device.wait(1 << 62, 0, (), 0.3)  # only rank 0 ends
    wake, write = os.pipe()
    os.write(write, b"x")
    ranks.device.wait(1 << 62, 0, (wake,), 600.0)
    assert ranks.device.ended() == 0
    os.close(wake)
    os.close(write)


def test_a_row_that_is_not_finite_on_any_rank_is_not_finite() -> None:
    two = TwoRanks(finite=0)
    two.launch(1)
    two.first.may_end.release()
    two.second.may_end.release()
    two.device.wait(1 << 62, 0, (), 30.0)
    assert two.device.ended() == 1
    assert two.device.rings.finite[1].tolist() == [0, 0, 0, 0]
    two.close()


def test_a_fault_of_any_rank_is_the_launch_s(ranks: TwoRanks) -> None:
    ranks.second.fault = FAULT_PLAN_NUMBER
    ranks.launch(1)
    ranks.first.may_end.release()
    ranks.second.may_end.release()
    ranks.device.wait(1 << 62, 0, (), 30.0)
    assert ranks.device.ended() == 1
    assert ranks.device.rings.status[1, STATUS_FAULT] == FAULT_PLAN_NUMBER


def test_a_rank_that_finds_another_launch_s_plan_stops(ranks: TwoRanks) -> None:
    ranks.launch(1, staged_as=5)
    ranks.thread.join(30.0)
    assert ranks.failed == ["rank 1 found plan 5 where plan 1 should be"]
    assert ranks.second.seen == []


def test_a_rank_that_has_ended_fails_the_device_and_wakes_who_waits(ranks: TwoRanks) -> None:
    ranks.launch(1)
    ranks.followers.said = "rank 1 has ended (signal SIGKILL)"
    os.write(ranks.followers.tell, b"e")
    ranks.device.wait(1 << 62, 0, (), 600.0)
    for mark in (ranks.device.sampled, ranks.device.ended):
        with pytest.raises(DeviceError, match="rank 1 has ended"):
            mark()
    assert ranks.segment.aborted, "what waits for that rank on a device ends"


def test_a_rank_that_has_waited_too_long_fails_the_device_by_name(ranks: TwoRanks) -> None:
    ranks.segment.views.words[1, FAULT_PEER] = 0
    ranks.segment.views.words[1, FAULT] = 17
    with pytest.raises(DeviceError, match="rank 1 has waited too long for rank 0 in exchange 17"):
        ranks.device.sampled()


def test_a_rank_that_gives_up_while_marks_are_read_fails_the_device(
    ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank writes that it gave up before any mark that follows from what it made up."""
    words = ranks.segment.views.words

    class Late:
        def sampled(self) -> int:
            words[1, FAULT] = 3
            return 1

        ended = in_tail = sampled

    with monkeypatch.context() as played:
        played.setattr(ranks.device, "_own", Late())
        for mark in (ranks.device.sampled, ranks.device.in_tail, ranks.device.ended):
            words[1, FAULT] = 0
            with pytest.raises(DeviceError, match="rank 1 has waited too long"):
                mark()


def test_marks_begin_where_launches_do() -> None:
    two = TwoRanks(launched=1 << 40)
    assert (two.device.sampled(), two.device.in_tail(), two.device.ended()) == (1 << 40, 1 << 40, 1 << 40)
    two.launch((1 << 40) + 1)
    two.first.may_end.release()
    two.second.may_end.release()
    two.device.wait(1 << 62, 1 << 40, (), 30.0)
    assert two.device.ended() == (1 << 40) + 1
    two.close()


def test_a_rank_starts_nothing_before_its_plan_is_published(ranks: TwoRanks) -> None:
    """A plan that lies in its slot is no launch: the word that is stored behind it is."""
    plan = LaunchPlan(1, np.arange(2, dtype=np.int32), np.ones(2, bool), True, np.zeros((0, 3), np.int32))
    stage(plan, ranks.device.rings.plan[1], ranks.device.rings.bulk[1])
    views = ranks.segment.views
    while ranks.looked.acquire(blocking=False):
        pass
    for _ in range(2):
        assert ranks.looked.acquire(timeout=30.0)
    assert ranks.second.seen == []
    assert views.host[LAUNCHED] == 0
    assert views.words[:, ENDED].tolist() == [0, 0]


def test_a_segment_has_no_name_and_two_maps_of_it_are_one_memory() -> None:
    before = set(Path("/dev/shm").iterdir())
    descriptor, memory = make_memory(LAYOUT)
    one = Segment(LAYOUT, memory)
    other = Segment(LAYOUT, map_memory(os.dup(descriptor), LAYOUT))
    assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith("(deleted)")
    assert set(Path("/dev/shm").iterdir()) == before
    one.views.parts[2, 1, 63] = 7.5
    one.rings(1).plan[3, 63] = 9
    assert other.views.parts[2, 1, 63] == 7.5
    assert other.rings(0).plan[3, 63] == 9
    with pytest.raises(ValueError, match="its layout takes"):
        map_memory(descriptor, SegmentLayout(3, RINGS, 64))
