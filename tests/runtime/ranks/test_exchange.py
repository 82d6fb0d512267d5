"""What ranks exchange: sums in one order, no mix-up, and no wait without an end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from runahead.runtime.kernels.ranks import Ranks, RanksError, fold
from runahead.runtime.ranks.exchange import HostRanks
from runahead.runtime.ranks.segment import FAULT, FAULT_PEER, Segment
from tests.runtime.ranks.host_ranks import memory_of, on_each, ranks_of


def test_a_sum_is_taken_in_rank_order_and_minus_zero_counts_as_plus_zero() -> None:
    parts = [np.array([1e8, -0.0], np.float32), np.array([1.0, -0.0], np.float32), np.array([-1e8, -0.0], np.float32)]
    out = np.empty(2, np.float32)
    fold(parts, out)
    assert out.tolist() == [0.0, 0.0]
    assert not np.signbit(out[1])
    fold([parts[0], parts[2], parts[1]], out)
    assert out[0] == 1.0, "another order gives another sum: this test would see it"


@pytest.mark.parametrize("of", [2, 3, 8])
def test_numbers_that_change_are_exchanged_without_a_mix_up(of: int) -> None:
    """Sums, gathered parts and what the first rank says, of sizes below and above a buffer's, again and again."""
    draw = np.random.default_rng(5)
    sizes = draw.integers(1, 300, 60).tolist()
    partials = [draw.standard_normal((of, size)).astype(np.float32) for size in sizes]

    def work(ranks: Ranks) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for number, each in enumerate(partials):
            own = torch.from_numpy(each[ranks.shard.rank].copy())
            words = np.full(number % 7 + 1, 100 * number + ranks.shard.rank, np.int32)
            ranks.reduce(own)
            ranks.spread(words)
            part = ranks.gather(torch.full((number % 5 + 1, 9), float(ranks.shard.rank)))
            found += [own.numpy(), words, part.numpy()]
        return found

    first, *others = on_each(ranks_of(of), work)
    for number, each in enumerate(partials):
        total = each[0]
        for part in each[1:]:
            total = total + part
        assert np.array_equal(first[3 * number], total)
        assert set(first[3 * number + 1].tolist()) == {100 * number}
        expected = np.repeat(np.arange(of, dtype=np.float32), 9)
        assert np.array_equal(first[3 * number + 2], np.tile(expected, (number % 5 + 1, 1)))
        for other in others:
            assert np.array_equal(other[3 * number], first[3 * number])
            assert np.array_equal(other[3 * number + 1], first[3 * number + 1])


def test_a_rank_that_is_ahead_does_not_write_over_what_others_have_yet_to_read() -> None:
    """The first rank says one thing after the other; the second one comes late."""
    first, second = ranks_of(2)

    def say() -> None:
        for number in range(20):
            first.spread(np.full(4, number, np.int32))

    said = threading.Thread(target=say)
    said.start()
    said.join(0.2)  # it waits for the second one by then
    assert said.is_alive()
    heard = []
    for _ in range(20):
        words = np.zeros(4, np.int32)
        second.spread(words)
        heard.append(words.tolist())
    said.join()
    assert heard == [[number] * 4 for number in range(20)]


def test_ranks_that_are_at_different_exchanges_fail_by_a_sentence() -> None:
    ranks = ranks_of(2)

    def work(own: Ranks) -> str:
        with pytest.raises(RanksError) as error:
            own.reduce(torch.zeros(4 + own.shard.rank))
            own.reduce(torch.zeros(4))
        return str(error.value)

    assert on_each(ranks, work)[0].startswith(
        "rank 1 is at another exchange than rank 0: step 1 is reduce of 5 numbers there and reduce of 4 numbers here"
    )


def test_a_rank_whose_peer_does_not_come_gives_up_after_the_bound_and_says_for_whom_it_waited() -> None:
    layout, memory = memory_of(3, 96)
    segment = Segment(layout, memory)
    ranks = [HostRanks(segment, rank, 0.2) for rank in range(2)]

    def work(own: Ranks) -> str:
        with pytest.raises(RanksError) as error:
            own.reduce(torch.zeros(4))
        return str(error.value)

    assert on_each(ranks, work) == [f"rank {n} has waited 0.2 s for rank 2 in step 1 (reduce)" for n in (0, 1)]
    assert segment.views.words[:, FAULT].tolist() == [1, 1, 0]
    assert segment.views.words[:, FAULT_PEER].tolist() == [2, 2, 0]


def test_time_in_which_a_rank_was_stopped_itself_is_no_wait_for_others() -> None:
    """A pause that takes longer than the bound, since the process stood still, counts as a short one."""
    layout, memory = memory_of(2, 96)
    segment = Segment(layout, memory)
    other = HostRanks(segment, 1, 60.0)
    paused = list[float]()

    def sleep(seconds: float) -> None:
        if not paused:
            time.sleep(0.5)
            threading.Thread(target=lambda: other.reduce(torch.ones(4))).start()
        paused.append(seconds)
        time.sleep(seconds)

    own = torch.ones(4)
    HostRanks(segment, 0, 0.4, sleep).reduce(own)
    assert own.tolist() == [2.0] * 4
    assert paused


def test_a_rank_that_waits_stops_when_it_is_told_to() -> None:
    layout, memory = memory_of(2, 96)
    segment = Segment(layout, memory)
    asleep = threading.Event()

    def sleep(seconds: float) -> None:
        asleep.set()
        threading.Event().wait(seconds)

    own, said = HostRanks(segment, 0, 10.0, sleep), list[str]()

    def work() -> None:
        with pytest.raises(RanksError) as error:
            own.reduce(torch.zeros(4))
        said.append(str(error.value))

    stopped = threading.Thread(target=work)
    stopped.start()
    assert asleep.wait(30.0)
    segment.abort()
    stopped.join(30.0)
    assert not stopped.is_alive()
    assert said == ["rank 0 was stopped in step 1"]
