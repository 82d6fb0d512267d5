"""The bound on idle time inside a launch that is enqueued piece by piece: never too low, nothing where all was well."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.cuda_graphs.enqueue_watch import EnqueueWatch


@dataclass
class Queue:
    """A device that runs what is enqueued, in order, each piece as soon as it is there. Times are ns on one clock.

    idle: how long it has run nothing since the end of what it was given first.
    """

    now: int = 0  # the host's clock
    ends: int = 0  # when the device is through with everything that it has
    idle: int = 0
    begun: bool = False

    def enqueue(self, device_ns: int, host_ns: int) -> None:
        """The host takes `host_ns` to enqueue a kernel that runs for `device_ns`."""
        self.now += host_ns
        if self.begun:
            self.idle += max(0, self.now - self.ends)
        self.begun = True
        self.ends = max(self.now, self.ends) + device_ns


@dataclass
class QueueMark:
    queue: Queue
    at: int = field(default=1 << 62)

    def record(self) -> None:
        self.at = max(self.queue.now, self.queue.ends)

    def query(self) -> bool:
        return self.queue.now >= self.at


def played(
    before_ns: int, first: tuple[int, int], pieces: list[list[tuple[int, int]]], late_ns: int = 0
) -> tuple[Queue, int]:
    """A launch of pieces, each of kernels as (device ns, host ns), behind work of `before_ns`. And the bound.

    late_ns: for how long the host is held up when it has enqueued the first piece.
    """
    queue = Queue()
    queue.ends = before_ns
    watch = EnqueueWatch(lambda: QueueMark(queue), lambda: queue.now)
    watch.begin()
    queue.enqueue(*first)
    queue.now += late_ns
    watch.first_piece()
    for piece in pieces:
        for device_ns, host_ns in piece:
            queue.enqueue(device_ns, host_ns)
        watch.piece()
    return queue, watch.idle_ns


kernels = st.tuples(st.integers(1, 300), st.integers(1, 300))


@settings(deadline=None, max_examples=400)
@given(
    st.integers(0, 3000),
    kernels,
    st.lists(st.lists(kernels, min_size=1, max_size=5), min_size=1, max_size=8),
    st.integers(0, 5000),
)
def test_the_bound_is_never_below_the_idle_time_nor_above_the_time_of_enqueueing(
    before_ns: int, first: tuple[int, int], pieces: list[list[tuple[int, int]]], late_ns: int
) -> None:
    queue, bound = played(before_ns, first, pieces, late_ns)
    assert queue.idle <= bound <= first[1] + late_ns + sum(host_ns for piece in pieces for _, host_ns in piece)


def test_a_launch_that_is_in_the_queue_before_the_device_comes_to_it_is_never_idle_inside() -> None:
    queue, bound = played(10_000, (50, 10), [[(20, 100)] * 5] * 8)
    assert (queue.idle, bound) == (0, 0)


def test_pieces_that_take_the_device_longer_than_the_host_count_for_the_first_one_at_most() -> None:
    queue, bound = played(0, (50, 10), [[(400, 100)] * 5] * 8)
    assert queue.idle == 50, "until the first kernel behind S was there"
    assert bound == 510, "the time of S and of the first piece behind it"


def test_a_host_that_is_held_up_behind_s_shows() -> None:
    queue, bound = played(0, (50, 10), [[(400, 10)]], late_ns=5_000)
    assert queue.idle == 4_960
    assert bound == 5_020


def test_a_host_that_stalls_between_two_pieces_shows_though_the_launch_looks_busy_from_its_ends() -> None:
    pieces = [[(400, 100)] * 5 for _ in range(8)]
    smooth, without = played(0, (50, 10), pieces)
    pieces[4][0] = (400, 1_000_000)
    stalled, bound = played(0, (50, 10), pieces)
    longer = stalled.ends - smooth.ends
    assert longer > 900_000, "from S's start to F's end it counts as busy"
    assert stalled.idle - smooth.idle == longer
    assert bound - without >= longer


@pytest.mark.parametrize("stalls", [False, True])
def test_a_launch_begins_without_the_idle_time_of_the_one_before(stalls: bool) -> None:
    queue = Queue()
    watch = EnqueueWatch(lambda: QueueMark(queue), lambda: queue.now)
    for host_ns in (1_000_000 if stalls else 10, 10):
        watch.begin()
        queue.enqueue(1000, 10)
        watch.first_piece()
        queue.enqueue(100, host_ns)
        watch.piece()
    assert watch.idle_ns == 0
