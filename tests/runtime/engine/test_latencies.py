"""Latency is a request's: from each of its tokens to its next, whatever lies between."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from runahead.runtime.engine.figures import Histogram, Latencies
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.steady_decode import TokenTimes
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import BOUNDS_S
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import HIGH_PROMPT, LOW_PROMPT, one_above_another, phase_of, turn_until_event
from tests.runtime.programs.hash_model import VOCAB

DEPTHS = [0, 1, 2, 4]
PAUSED_S = 11.0


def commit_of(slots: Sequence[int], firsts: Sequence[bool]) -> Commit:
    columns, wide = np.array(slots, np.int32), np.array(slots, np.int64)
    return Commit(1, columns.astype(np.intp), columns, columns, wide, wide, np.array(firsts, np.bool_), ())


def take(latencies: Latencies, slots: Sequence[int], now: float, *, first: bool = False) -> None:
    latencies.tokens(commit_of(slots, [first] * len(slots)), first, now)


class Clock:
    """A millisecond for each look at it, and as much more as a test wants."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def watch(chain: Chain) -> Callable[[], tuple[Histogram, float]]:
    """Writes down when each token was published. Returns what gives their histogram, and the longest time in it."""
    when: dict[tuple[int, int], list[float]] = defaultdict(list)
    publish = chain.engine.publisher.publish

    def watched(commit: Commit, now: float) -> None:
        for owner, handle in zip(commit.owners.tolist(), commit.handles.tolist(), strict=True):
            when[owner, handle].append(now)
        publish(commit, now)

    chain.engine.publisher.publish = watched  # type: ignore[method-assign]

    def expected() -> tuple[Histogram, float]:
        histogram, longest = Histogram(), 0.0
        for moments in when.values():
            for before, after in itertools.pairwise(moments):
                histogram.add(after - before)
                longest = max(longest, after - before)
        return histogram, longest

    return expected


# ---------------------------------------------------------------- one launch after the other


def test_the_times_of_rows_are_known_one_by_one_whatever_group_they_were_in() -> None:
    times = TokenTimes(4)
    assert np.isnan(times.last_s(2))
    times.advance(np.array([0, 2], np.int32), 5.0)
    assert times.advance(np.array([0, 2], np.int32), 7.0) == 2.0
    assert (times.last_s(0), times.last_s(2)) == (7.0, 7.0)
    since = times.advance(np.array([0, 2], np.int32), 8.0)
    assert np.broadcast_to(since, 2).tolist() == [1.0, 1.0], "looking changes nothing"
    times.begin(2, 3.5)
    assert (times.last_s(0), times.last_s(2)) == (8.0, 3.5)
    assert np.broadcast_to(times.advance(np.array([0, 2], np.int32), 9.0), 2).tolist() == [1.0, 5.5]
    times.begin(1, 4.0)
    assert times.advance(np.array([0, 2], np.int32), 9.5) == 0.5, "a row beside them has begun: they are one group"
    assert np.broadcast_to(times.advance(np.array([0, 1, 2], np.int32), 10.0), 3).tolist() == [0.5, 6.0, 0.5]


def test_rows_of_one_pace_and_rows_that_were_left_out_have_their_own_times() -> None:
    latencies = Latencies(TokenTimes(4), drafts=0)
    take(latencies, [0, 1, 2], 10.0, first=True)
    take(latencies, [0, 1, 2], 10.5)
    take(latencies, [0, 2], 11.0)  # row 1 is paused
    take(latencies, [0, 1, 2], 21.0)
    expected = Histogram()
    expected.add_each(np.array([0.5] * 3 + [0.5] * 2 + [10.0, 10.5, 10.0]))
    assert latencies.inter_token.counts.tolist() == expected.counts.tolist()
    assert latencies.inter_token.sum_s == 0.5 * 3 + 0.5 * 2 + 30.5


def test_a_first_token_has_none_before_it_and_the_rows_beside_it_have() -> None:
    latencies = Latencies(TokenTimes(4), drafts=0)
    take(latencies, [3], 10.0, first=True)
    latencies.tokens(commit_of([1, 3], [True, False]), True, 12.0)
    assert (latencies.inter_token.counts.sum(), latencies.inter_token.sum_s) == (1, 2.0)


def test_a_launch_that_brings_no_token_has_no_times() -> None:
    latencies = Latencies(TokenTimes(4), drafts=0)
    take(latencies, [], 10.0)
    take(latencies, [1], 11.0, first=True)
    take(latencies, [], 12.0)
    take(latencies, [1], 13.0)
    assert (latencies.inter_token.counts.sum(), latencies.inter_token.sum_s) == (1, 2.0)


def test_tokens_of_a_row_that_come_together_have_waited_once() -> None:
    latencies = Latencies(TokenTimes(4), drafts=3)
    take(latencies, [0, 2], 10.0, first=True)
    take(latencies, [0, 0, 0, 2], 13.0)
    take(latencies, [0, 2, 2], 14.0)
    assert latencies.inter_token.counts[0] == 3, "two beside the first of row 0, then one of row 2"
    assert (latencies.inter_token.counts.sum(), latencies.inter_token.sum_s) == (7, 3.0 + 3.0 + 1.0 + 1.0)


# ---------------------------------------------------------------- what the engine counts


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_time_of_an_eviction_is_part_of_the_latency(depth: int) -> None:
    clock = Clock()
    chain = one_above_another(depth, clock=clock)
    expected = watch(chain)
    turn_until_event(chain, "evicted")
    chain.turn_until(lambda: phase_of(chain, 2) == "WAITING")
    clock.now += PAUSED_S
    chain.run()
    stats, (histogram, longest) = chain.engine.stats(), expected()
    assert stats.events["readmitted"].count == 1
    assert longest > PAUSED_S, "nobody waited so long"
    assert stats.inter_token.counts == histogram.counts.tolist()
    beyond = sum(count for bound, count in zip((*BOUNDS_S, 1e9), stats.inter_token.counts, strict=True) if bound > 11)
    assert beyond >= 1
    assert stats.inter_token.sum_s == pytest.approx(histogram.sum_s)
    assert sum(len(tokens) for tokens in chain.tokens().values()) == sum(stats.inter_token.counts) + 2


def test_every_token_of_random_lives_counts_with_the_time_since_its_requests_last_one() -> None:
    happened: Counter[str] = Counter()
    for seed in range(40):
        dice = random.Random(seed)
        chain = random_chain(dice)
        expected = watch(chain)
        live(chain, dice)
        stats, (histogram, _) = chain.engine.stats(), expected()
        assert stats.inter_token.counts == histogram.counts.tolist(), seed
        assert stats.inter_token.sum_s == pytest.approx(histogram.sum_s), seed
        happened.update({kind: event.count for kind, event in stats.events.items()})
    assert min(happened[kind] for kind in ("paused", "resumed", "evicted", "readmitted", "aborted")) > 0, happened


def random_chain(dice: random.Random) -> Chain:
    """With blocks for two of its four rows, and a clock that leaps."""
    clock, leaps = Clock(), random.Random(dice.random())

    def uneven() -> float:
        clock.now += leaps.choice((0.0, 0.0, 0.0001, 0.003, 2.0))
        return clock.now

    schedule = seeded_schedule(dice.randrange(1000))
    return make_chain(dice.choice(DEPTHS), schedule=schedule, max_rows=4, num_blocks=1 + 9, clock=uneven)


def live(chain: Chain, dice: random.Random) -> None:
    for handle in range(1, 13):
        prompt = [dice.randrange(2, VOCAB) for _ in range(dice.randint(1, 30))]
        chain.submit(handle, prompt, max_tokens=dice.randint(1, 30), priority=dice.choice((0, 0, 1)))
        if dice.random() < 0.2:
            chain.tell(m.Abort(handle, (f"r{dice.randint(1, handle)}",)))
        for _ in range(dice.randint(0, 6)):
            chain.turn()
    chain.run()


def test_latencies_are_on_the_engines_clock() -> None:
    chain = make_chain(clock=Clock())
    expected = watch(chain)
    chain.submit(1, [3, 4], max_tokens=5, ignore_eos=True)
    chain.submit(2, [5, 6], max_tokens=5, ignore_eos=True)
    chain.run()
    stats = chain.engine.stats()
    assert sum(stats.first_token.counts) == 2, "one first token each"
    assert sum(stats.inter_token.counts) == 8, "four more each"
    assert stats.inter_token.counts == expected()[0].counts.tolist()
    ends = [end for (end,) in chain.finished().values()]
    for end in ends:
        assert 0 < end.queue_s < end.first_token_s
        assert end.first_token_s == pytest.approx(end.queue_s + end.prefill_s)
        assert end.decode_s > 0
    assert stats.first_token.sum_s == pytest.approx(sum(end.first_token_s for end in ends))


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_times_of_a_request_add_up_to_the_time_from_its_first_token_to_its_last(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, clock=Clock())
    chain.submit(1, HIGH_PROMPT, max_tokens=12, ignore_eos=True)
    chain.submit(2, LOW_PROMPT, max_tokens=7, ignore_eos=True)
    chain.run()
    decode_s = sum(end.decode_s for (end,) in chain.finished().values())
    assert chain.engine.stats().inter_token.sum_s == pytest.approx(decode_s)
