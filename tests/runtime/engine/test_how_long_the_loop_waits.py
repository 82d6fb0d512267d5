"""The loop does not wait while something is left to do, and no longer than until an answer is due."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runahead.cuda_graphs.device import NEVER
from runahead.runtime.engine.intake import STATS_S, TURN_WORK
from runahead.runtime.wire import messages as m
from tests.runtime.chain import Chain, make_chain, no_step

LONGEST_S = 0.25


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Waits:
    """How long each wait since the last look was to last, in seconds, and whether an arrival was to end it."""

    def __init__(self, chain: Chain) -> None:
        self.of_device: list[float] = []
        self.of_links: list[float] = []
        self.wake_fds: list[Sequence[int]] = []
        device_wait = chain.device.wait
        chain.links.wake_fds = lambda: (7,)  # type: ignore[method-assign]

        def wait(sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
            self.of_device.append(timeout_s)
            self.wake_fds.append(wake_fds)
            device_wait(sampled, ended, wake_fds, timeout_s, in_tail)

        chain.device.wait = wait  # type: ignore[method-assign]
        chain.links.wait = self.of_links.append  # type: ignore[method-assign, assignment]


def chain_that(is_busy: bool, clock: Clock) -> Chain:
    """With a row that decodes, launches in flight, or with nothing to do."""
    chain = make_chain(
        2, schedule=no_step, num_blocks=400, context_length=1200, max_prefill_tokens=64, clock=clock,
        turn_work=TURN_WORK,
    )  # fmt: skip
    if is_busy:
        chain.submit(1, [3, 4], max_tokens=1000, ignore_eos=True)
        chain.turn_until(lambda: chain.tokens())
    return chain


def turns(chain: Chain, waits: Waits, count: int) -> list[list[float]]:
    """The waits of so many turns, for marks or for arrivals."""
    found = []
    for _ in range(count):
        waits.of_device.clear()
        waits.of_links.clear()
        chain.turn()
        found.append([*waits.of_device, *waits.of_links])
    return found


@pytest.mark.parametrize(("is_busy", "at_once"), [(True, [0.0]), (False, [])])
def test_it_does_not_wait_while_messages_are_left(is_busy: bool, at_once: list[float]) -> None:
    chain = chain_that(is_busy, Clock())
    waits = Waits(chain)
    chain.tell(m.StatsQuery(1))  # which is answered, so that nothing but messages is left
    for handle in range(TURN_WORK + 1):
        chain.tell(m.Cancel(500 + handle))
    assert turns(chain, waits, 4) == [at_once, at_once, [LONGEST_S], [LONGEST_S]]


@pytest.mark.parametrize(("is_busy", "at_once"), [(True, [0.0]), (False, [])])
def test_it_does_not_wait_while_a_message_is_half_done(is_busy: bool, at_once: list[float]) -> None:
    chain = chain_that(is_busy, Clock())
    waits = Waits(chain)
    chain.tell(m.Abort(1, tuple(f"nobody {i}" for i in range(2 * TURN_WORK))))
    assert turns(chain, waits, 4) == [at_once, at_once, [LONGEST_S], [LONGEST_S]]


@pytest.mark.parametrize(("is_busy", "at_once"), [(True, [0.0]), (False, [])])
def test_it_does_not_wait_while_answers_are_left_to_be_sent(is_busy: bool, at_once: list[float]) -> None:
    clock = Clock()
    chain = chain_that(is_busy, clock)
    waits = Waits(chain)
    for call in range(4):
        chain.tell(m.StatsQuery(call))
    chain.turn()
    turns(chain, waits, 1)
    assert not chain.links.has_more
    answered = [message for _, message in chain.links.sent if isinstance(message, m.StatsReply)]
    assert len(answered) == 1, "the others came too late for its figures"
    clock.now += 2 * STATS_S
    assert turns(chain, waits, 3) == [at_once, [LONGEST_S], [LONGEST_S]]
    answered = [message for _, message in chain.links.sent if isinstance(message, m.StatsReply)]
    assert [answer.call for answer in answered] == [0, 1, 2, 3]


@pytest.mark.parametrize(("is_busy", "at_once"), [(True, [0.0]), (False, [])])
def test_it_does_not_wait_while_a_prefix_is_not_looked_up_to_its_end(is_busy: bool, at_once: list[float]) -> None:
    chain = chain_that(False, Clock())
    prompt = [5 + i % 80 for i in range(1100)]  # 137 blocks, more than are looked up in a turn
    chain.submit(1, prompt, max_tokens=2, ignore_eos=True)
    chain.run()
    if is_busy:
        chain.submit(2, [3, 4], max_tokens=1000, ignore_eos=True)
        chain.turn_until(lambda: 2 in chain.tokens())
    waits = Waits(chain)
    chain.submit(3, prompt, max_tokens=2, ignore_eos=True)
    hidden_reader = 0
    while not chain.is_running("r3"):
        (waited,) = turns(chain, waits, 1)
        hidden_reader += not chain.is_running("r3")
        assert chain.is_running("r3") or waited == at_once
    assert hidden_reader > 0, "it was found at once, and this test shows nothing"
    chain.turn_until(lambda: 3 in chain.finished())
    assert chain.finished()[3][0].cached_tokens == 1096
    assert turns(chain, waits, 2)[1] == [LONGEST_S]


@pytest.mark.parametrize("is_busy", [True, False])
def test_it_waits_until_figures_may_be_gathered_again_for_somebody_who_has_asked(is_busy: bool) -> None:
    clock = Clock()
    chain = chain_that(is_busy, clock)
    waits = Waits(chain)
    chain.tell(m.StatsQuery(1))
    assert turns(chain, waits, 2)[1] == [LONGEST_S], "it is answered, and nobody else has asked"
    clock.now += STATS_S / 4
    chain.tell(m.StatsQuery(2))
    assert turns(chain, waits, 1) == [[pytest.approx(STATS_S * 3 / 4)]]
    clock.now += STATS_S / 2
    assert turns(chain, waits, 1) == [[pytest.approx(STATS_S / 4)]]
    clock.now += STATS_S / 2
    assert turns(chain, waits, 2)[1] == [LONGEST_S]
    answered = [message.call for _, message in chain.links.sent if isinstance(message, m.StatsReply)]
    assert answered == [1, 2]


def test_a_drain_waits_for_marks_whatever_has_arrived() -> None:
    """Nothing of it is taken before the drain is over: to look again and again would only heat the processor."""
    chain = chain_that(True, Clock())
    waits = Waits(chain)
    for handle in range(100):
        chain.tell(m.Cancel(500 + handle))
    turns(chain, waits, 1)
    waits.of_device.clear()
    waits.wake_fds.clear()
    assert chain.ledger.in_flight
    chain.engine.drain("test")
    assert set(waits.of_device) == {LONGEST_S}
    assert set(waits.wake_fds) == {()}
    assert chain.links.has_more


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_each_wait_of_the_loop_is_a_heartbeat_a_drain_s_too(is_busy: bool) -> None:
    chain = chain_that(is_busy, Clock())
    beats, waits = chain.links.beats, 0
    for _ in range(3):
        chain.engine.turn()
    assert chain.links.beats == beats + 3
    if is_busy:
        assert chain.engine.ledger.in_flight
        beats, waits = chain.links.beats, chain.engine.waits
        chain.engine.drain("shutdown")
        assert chain.links.beats - beats == chain.engine.waits - waits > 0
