"""What counts as a turn's work, and whose it is, when more has arrived than one turn takes."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path

import numpy as np

from runahead.runtime.engine.intake import STATS_S, TURN_WORK, Intake
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.chain import Chain, make_chain, no_step, nobody_is_refused
from tests.runtime.programs.hash_model import VOCAB

INFO = m.EngineInfo("m", "a", VOCAB, 128, (1,), -1, 2, 3, 4, 8, 2, "cpu", "float32", 5)
EACH = 40


def answers(chain: Chain, kind: type) -> int:
    return sum(isinstance(message, kind) for _, message in chain.links.sent)


def test_answers_to_stats_are_most_of_a_turn_s_work() -> None:
    now = [100.0]
    chain = make_chain(2, schedule=no_step, clock=lambda: now[0], turn_work=TURN_WORK)
    for call in range(9):
        chain.tell(m.StatsQuery(call))
    chain.turn_until(lambda: not chain.engine.intake.has_more)
    assert answers(chain, m.StatsReply) == 1, "the others wait for the next figures"
    now[0] += 2 * STATS_S
    sent: list[int] = []
    while chain.engine.intake.has_more or not sent:
        before = answers(chain, m.StatsReply)
        chain.turn()
        sent.append(answers(chain, m.StatsReply) - before)
    assert sent == [2, 2, 2, 2]


def test_a_long_prompt_is_all_of_a_turn_s_work() -> None:
    """Its tokens, distinct ids and keys are copied: 3 times 64 KiB and more of tokens alone, in each of five."""
    chain = make_chain(2, schedule=no_step, turn_work=TURN_WORK)
    for handle in range(1, 6):
        chain.submit(handle, [5] * (3 << 14), max_tokens=1)
    for handle in range(6, 11):
        chain.submit(handle, [5] * 200, max_tokens=1)
    refused = []
    while chain.engine.intake.has_more:
        before = answers(chain, m.Refused)
        chain.turn()
        refused.append(answers(chain, m.Refused) - before)
    assert [count for count in refused if count] == [1, 1, 1, 1, 1, 4, 1]


def test_the_requests_of_front_ends_that_speak_at_once_are_queued_in_turn(tmp_path: Path) -> None:
    """Three of them ask for forty requests each, and a fourth for one: real sockets, four pieces of work a turn."""
    chain = make_chain(2, schedule=no_step, max_queue=1000)
    engine = chain.engine
    links = SocketLinks(tmp_path / "engine", m.Welcome(m.PROTOCOL_VERSION, "server", INFO), nobody_is_refused)
    intake = Intake(
        engine.scheduler, engine.registry, engine.publisher, links, engine.structured, engine.stats,
        engine.recorder.trace, Counter(), 1000, lambda: 1.0,
        TURN_WORK,
    )  # fmt: skip
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for sock in sockets:
        sock.connect(str(tmp_path / "engine"))
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        intake.take()
    prompt = np.array([3, 4], np.int32)
    for owner, sock in enumerate(sockets, 1):
        for handle in range(1, 1 + (EACH if owner < 4 else 1)):
            submit = prepared_submit(
                handle, f"{owner}-{handle}", prompt, SamplingParams(), StoppingParams(2), block_size=0
            )  # fmt: skip
            sock.sendall(m.encode_frame(submit))
    while len(engine.registry) < 3 * EACH + 1:
        before = len(engine.registry)
        intake.take()
        assert 0 < len(engine.registry) - before <= TURN_WORK
    queued = [tracked.request.owner for tracked in engine.registry.all()]
    assert 4 in queued[:4], "it waits for one request of each of the others"
    queued.remove(4)
    for count in range(0, 3 * EACH, 3):
        assert Counter(queued[count : count + 3]) == {1: 1, 2: 1, 3: 1}
    for owner in (1, 2, 3):
        handles = [tracked.request.handle for tracked in engine.registry.of_owner(owner)]
        assert handles == list(range(1, EACH + 1)), "in its order"
    for sock in sockets:
        sock.close()
    links.close()
