"""Whatever arrives at once, a turn of the loop does a bounded part of it, in order, and forgets nothing."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from runahead.runtime.engine.intake import STATS_S, TURN_WORK
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.chain import Chain, make_chain, no_step, nobody_is_refused
from tests.runtime.programs.hash_model import completion

DEPTHS = [0, 1, 2, 4]
MANY = 160


def crowd(depth: int = 2, max_rows: int = 2) -> Chain:
    """Two rows that decode, and many who wait for theirs."""
    chain = make_chain(
        depth,
        schedule=no_step,
        max_rows=max_rows,
        max_queue=1000,
        context_length=1000,
        num_blocks=400,
        turn_work=TURN_WORK,
    )
    for handle in range(1, max_rows + 1):
        chain.submit(handle, [handle, 4], max_tokens=900, ignore_eos=True)
    chain.turn_until(lambda: len(chain.engine.scheduler.holdings.requests()) == max_rows)
    for handle in range(max_rows + 1, max_rows + 1 + MANY):
        chain.submit(handle, [handle % 90, 4], owner=1 + handle % 2, max_tokens=3)
    chain.turn_until(lambda: not chain.engine.intake.has_more)
    return chain


T = TypeVar("T")


def messages_of(chain: Chain, kind: type[T]) -> list[tuple[int, T]]:
    return [(owner, message) for owner, message in chain.links.sent if isinstance(message, kind)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_burst_is_taken_in_pieces_in_its_order_while_the_launches_go_on(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, max_rows=2, max_queue=1000, turn_work=TURN_WORK)
    chain.submit(1, [3, 4], max_tokens=100, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    for handle in range(2, 62):
        chain.submit(handle, [handle, 4], max_tokens=2)
    turns, launched = 0, chain.ledger.launched
    while chain.engine.intake.has_more:
        before = len(messages_of(chain, m.Accepted))
        chain.turn()
        turns += 1
        assert len(messages_of(chain, m.Accepted)) - before <= TURN_WORK
    assert turns >= 60 // TURN_WORK
    assert chain.ledger.launched - launched >= turns // 2, "nobody waits for the burst"
    assert [message.handle for _, message in messages_of(chain, m.Accepted)] == list(range(1, 62))
    chain.run()
    assert {handle: len(ends) for handle, ends in chain.finished().items()} == dict.fromkeys(range(1, 62), 1)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_all_are_aborted_in_pieces_and_exactly_those_that_were_there(depth: int) -> None:
    chain = crowd(depth)
    there = chain.engine.registry.ids()
    chain.tell(m.Abort(7, (), True), owner=2)
    chain.submit(999, [3, 4], owner=2, max_tokens=3)
    ended = 0
    while not messages_of(chain, m.AbortResult):
        chain.turn()
        now = chain.engine.stats().finished.get("ABORTED", 0)
        assert now - ended <= TURN_WORK
        ended = now
    ((owner, result),) = messages_of(chain, m.AbortResult)
    assert isinstance(result, m.AbortResult)
    assert (owner, result.call, set(result.outcomes)) == (2, 7, {"ABORTED"})
    assert result.request_ids == there
    assert chain.engine.stats().admitted == 2, "nobody was given a row on the way"
    chain.run()
    assert chain.tokens(2)[999] == completion([3, 4], 0, 3), "what came behind it was served"
    chain.check_nothing_is_left()


def test_ids_are_aborted_in_pieces_and_answered_in_their_order() -> None:
    chain = crowd()
    names = tuple(f"r{handle}" for handle in range(3, 103, 2)[:40])
    asked = ("nobody", *names[::-1], names[0])
    chain.tell(m.Abort(1, asked))
    turns = 0
    while not messages_of(chain, m.AbortResult):
        chain.turn()
        turns += 1
    ((_, result),) = messages_of(chain, m.AbortResult)
    assert turns >= 40 // TURN_WORK
    assert isinstance(result, m.AbortResult)
    assert result.request_ids == asked
    assert Counter(result.outcomes)["NOT_FOUND"] >= 1
    assert result.outcomes[0] == "NOT_FOUND"
    assert result.outcomes[-1] in ("ALREADY_FINISHED", "NOT_FOUND")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_lost_front_end_s_requests_end_in_pieces_and_nobody_else_s(depth: int) -> None:
    chain = crowd(depth)
    lost = len(chain.engine.registry.of_owner(2))
    assert lost > 60
    chain.tell(None, owner=2)
    turns = 0
    while chain.engine.registry.of_owner(2):
        before = len(chain.engine.registry.of_owner(2))
        chain.turn()
        turns += 1
        assert before - len(chain.engine.registry.of_owner(2)) <= TURN_WORK + chain.engine.scheduler.rows.max_rows
    assert turns >= lost // (2 * TURN_WORK)
    stats = chain.engine.stats()
    assert stats.front_ends_lost == 1
    assert stats.finished["CANCELLED"] + stats.finished.get("LENGTH", 0) >= lost
    chain.run()
    assert {handle: len(ends) for handle, ends in chain.finished(1).items()} == dict.fromkeys(
        [1, 2, *(handle for handle in range(3, 3 + MANY) if handle % 2 == 0)], 1
    )
    chain.check_nothing_is_left()


def test_stats_are_gathered_now_and_then_and_every_answer_is_younger_than_its_question() -> None:
    now = [100.0]
    chain = make_chain(2, schedule=no_step, clock=lambda: now[0], turn_work=TURN_WORK)
    gathered: list[float] = []
    gather = chain.engine.intake._stats
    chain.engine.intake._stats = lambda: gathered.append(now[0]) or gather()  # type: ignore[func-returns-value]
    chain.submit(1, [3, 4], max_tokens=120, ignore_eos=True)
    asked: dict[int, float] = {}
    for call in range(100):
        asked[call] = now[0]
        chain.tell(m.StatsQuery(call), owner=1 + call % 2)
        chain.turn()
        now[0] += STATS_S / 10
    for _ in range(12):
        chain.turn()
        now[0] += STATS_S / 10
    answers = [message for _, message in messages_of(chain, m.StatsReply) if isinstance(message, m.StatsReply)]
    assert sorted(answer.call for answer in answers) == list(range(100)), "each once"
    assert 9 <= len(gathered) <= 12
    for owner, message in messages_of(chain, m.StatsReply):
        assert isinstance(message, m.StatsReply)
        assert owner == 1 + message.call % 2
        assert chain.engine.times._started_at + message.stats.uptime_s >= asked[message.call]


# ---------------------------------------------------------------- sockets

INFO = m.EngineInfo("m", "a", 100, 500, (1,), -1, 2, 3, 4, 16, 2, "cpu", "float32", 5)


def test_of_several_front_ends_none_waits_for_another_s_burst(tmp_path: Path) -> None:
    links = SocketLinks(tmp_path / "engine", m.Welcome(m.PROTOCOL_VERSION, "server", INFO), nobody_is_refused)
    loud, modest = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for sock in (loud, modest):
        sock.connect(str(tmp_path / "engine"))
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
    loud.sendall(b"".join(m.encode_frame(m.Cancel(i)) for i in range(1, 1001)))
    modest.sendall(m.encode_frame(m.StatsQuery(1)))
    for _ in range(3):  # one connection after the other, then what they said
        links.receive()
    arrived = links.receive()
    assert (2, m.StatsQuery(1)) in [next(arrived) for _ in range(3)]
    assert links.has_more
    left = [message for _, message in links.receive()]
    assert [m.Cancel(i) for i in range(3, 1001)] == left, "in order, and each once"
    assert not links.has_more
    loud.close()
    modest.close()
    links.close()


def test_front_ends_take_turns_from_one_turn_of_the_loop_to_the_next_and_an_end_is_seen_among_bursts(
    tmp_path: Path,
) -> None:
    """Each turn takes four messages. Four front ends have hundreds, a fifth asks once, a sixth goes away."""
    links = SocketLinks(tmp_path / "engine", m.Welcome(m.PROTOCOL_VERSION, "server", INFO), nobody_is_refused)
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(6)]
    for sock in sockets:
        sock.connect(str(tmp_path / "engine"))
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        next(links.receive(), None)
    for _ in range(2):
        next(links.receive(), None)
    for sock in sockets[:4]:
        sock.sendall(b"".join(m.encode_frame(m.Cancel(i)) for i in range(1, 301)))
    sockets[4].sendall(m.encode_frame(m.StatsQuery(1)))
    sockets[5].close()
    heard: list[tuple[int, m.ToEngine | None]] = []
    for _ in range(4):
        heard += islice(links.receive(), 4)
    assert (5, m.StatsQuery(1)) in heard
    assert (6, None) in heard
    while links.has_more:
        heard += islice(links.receive(), 4)
    for owner in range(1, 5):
        assert [message for of, message in heard if of == owner] == [m.Cancel(i) for i in range(1, 301)], "in order"
    for sock in sockets:
        sock.close()
    links.close()


def test_aborts_of_all_that_find_nobody_are_work_too() -> None:
    chain = make_chain(2, schedule=no_step, turn_work=TURN_WORK)
    for call in range(100):
        chain.tell(m.Abort(call, (), True))
    answered: list[tuple[int, m.AbortResult]] = []
    while len(answered) < 100:
        before = len(answered)
        chain.turn()
        answered = messages_of(chain, m.AbortResult)
        assert len(answered) - before <= TURN_WORK


@pytest.mark.parametrize("depth", DEPTHS)
def test_those_who_wait_for_a_front_end_that_is_lost_are_given_no_row(depth: int) -> None:
    """All rows are its own: as they end, the next ones of its queue would have theirs."""
    chain = make_chain(depth, schedule=no_step, max_rows=2, max_queue=1000, turn_work=TURN_WORK)
    for handle in range(1, 61):
        chain.submit(handle, [handle, 4], owner=2, max_tokens=60, ignore_eos=True)
    chain.turn_until(lambda: not chain.engine.intake.has_more)
    admitted = chain.engine.stats().admitted
    assert len(chain.engine.registry.of_owner(2)) > 50
    chain.tell(None, owner=2)
    chain.run()
    assert chain.engine.stats().admitted == admitted
    assert chain.engine.stats().front_ends_lost == 1
    chain.check_nothing_is_left()


def test_a_front_end_that_says_more_than_is_taken_is_not_read_any_further(tmp_path: Path) -> None:
    """What it says stays in its socket, and so with it: nothing grows here."""
    links = SocketLinks(tmp_path / "engine", m.Welcome(m.PROTOCOL_VERSION, "server", INFO), nobody_is_refused)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(tmp_path / "engine"))
    sock.setblocking(False)
    sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
    prompt = np.full(400, 5, np.int32)
    frames = b"".join(
        m.encode_frame(
            prepared_submit(i, f"r{i}", prompt, SamplingParams(), StoppingParams(5), block_size=0)
        )
        for i in range(1, 3000)
    )  # fmt: skip
    sent = 0
    for _ in range(200):
        with contextlib.suppress(BlockingIOError):
            sent += sock.send(frames[sent:])
        next(links.receive(), None)
    (connection,) = links._connections.values()
    assert len(connection.reader._buffer) <= 2 << 16
    assert sent < len(frames), "its socket is full"
    links.send(1, m.Accepted(1))
    sock.close()
    reasons = [message for _, message in links.receive()]
    assert reasons, "what had arrived is still there"
    links.close()


def test_a_reason_of_a_cancel_counts_as_before() -> None:
    chain = crowd()
    chain.tell(m.Cancel(4, FinishReason.STOP), owner=1)
    chain.tell(m.Cancel(3), owner=2)
    chain.turn()
    assert {"STOP": 1, "CANCELLED": 1}.items() <= chain.engine.stats().finished.items()
