"""A request's latencies count from when it was submitted, wherever it waits to be taken."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runahead.runtime.engine.intake import TURN_WORK, Intake
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.engine.live_requests import EARLY_ABORT_S
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams, WaitReason
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.chain import Chain, make_chain, no_step, nobody_is_refused
from tests.runtime.programs.hash_model import VOCAB

INFO = m.EngineInfo("m", "a", VOCAB, 128, (1,), -1, 2, 3, 4, 8, 2, "cpu", "float32", 5)
CONNECTED_AT, READ_AT = 100.0, 120.0


class Door:
    """An engine's intake behind a real socket, on a clock that stands still until it is told. A turn has work for one
    request, unless told otherwise."""

    def __init__(self, path: Path, turn_work: int) -> None:
        self.now = CONNECTED_AT
        self.chain: Chain = make_chain(2, schedule=no_step, max_queue=1000, clock=lambda: self.now)
        engine = self.chain.engine
        welcome = m.Welcome(m.PROTOCOL_VERSION, "server", INFO)
        self.links = SocketLinks(path, welcome, nobody_is_refused, clock=lambda: self.now)
        self.intake = Intake(
            engine.scheduler, engine.registry, engine.publisher, self.links, engine.structured, engine.stats,
            engine.recorder.trace,
            Counter(), 1000,
            lambda: self.now,
            turn_work,
        )  # fmt: skip
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(path))
        self.intake.take()  # it is accepted
        self.sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        self.intake.take()

    def send(self, handle: int, said: float | None, *, announced: bool = False) -> None:
        self.sock.sendall(
            m.encode_frame(
                prepared_submit(
                    handle, f"r{handle}", np.array([3, 4], np.int32), SamplingParams(), StoppingParams(2), block_size=0,
                    submitted_at=said, announced=announced,
                )
            )
        )  # fmt: skip

    def submitted_at(self, handle: int) -> float:
        tracked = self.chain.engine.registry.by_id(f"r{handle}")
        assert tracked is not None
        return tracked.submitted_at


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path / "engine", turn_work=1)
    yield made
    made.sock.close()
    made.links.close()


@pytest.mark.parametrize(
    ("said", "counts_from"),
    [
        (CONNECTED_AT + 5, CONNECTED_AT + 5),
        (None, READ_AT),
        (READ_AT + 1, READ_AT),
        (math.inf, READ_AT),
        (math.nan, READ_AT),
        (CONNECTED_AT - 1, CONNECTED_AT),
        (-math.inf, CONNECTED_AT),
    ],
    ids=["in the socket", "not said", "to come", "never", "no number", "before it was there", "always"],
)
def test_a_request_counts_from_when_its_front_end_says_within_what_was_seen_of_it(
    door: Door, said: float | None, counts_from: float
) -> None:
    door.send(1, said)
    door.now = READ_AT
    door.intake.take()
    assert door.submitted_at(1) == counts_from


def test_what_was_read_together_counts_from_then_in_whichever_turn_it_is_taken(door: Door) -> None:
    door.now = READ_AT
    for handle in (1, 2, 3):
        door.send(handle, None)
    for handle in (1, 2, 3):
        door.intake.take()
        assert door.submitted_at(handle) == READ_AT
        door.now += 7


def test_latencies_and_times_hold_what_a_request_waited_to_be_taken(tmp_path: Path) -> None:
    door = Door(tmp_path / "engine", TURN_WORK)
    door.send(1, CONNECTED_AT + 1)  # and lies in the socket
    door.now = READ_AT
    door.intake.take()
    door.chain.run()
    (end,) = [end for output in door.chain.outputs() for end in output.finished]
    (admitted,) = door.chain.admitted().values()
    waited_s = READ_AT - CONNECTED_AT - 1
    assert admitted.queue_s == end.queue_s == end.first_token_s == waited_s
    assert (admitted.waited_for, admitted.waited_s) == (WaitReason.INTAKE, waited_s)
    stats = door.chain.engine.stats()
    assert stats.first_token.sum_s == stats.queue.sum_s == stats.end_to_end.sum_s == waited_s
    assert sum(stats.queue.counts) == sum(stats.end_to_end.counts) == 1
    door.sock.close()
    door.links.close()


def test_times_of_an_announced_request_count_from_its_announcement_and_its_intake_from_its_submit(door: Door) -> None:
    door.sock.sendall(m.encode_frame(m.Announce(1, "r1", CONNECTED_AT + 1)))
    door.intake.take()
    door.send(1, READ_AT - 3, announced=True)
    door.now = READ_AT
    door.intake.take()
    assert door.submitted_at(1) == CONNECTED_AT
    door.chain.run()
    (admitted,) = door.chain.admitted().values()
    assert admitted.queue_s == READ_AT - CONNECTED_AT
    assert (admitted.waited_for, admitted.waited_s) == (WaitReason.INTAKE, 3.0)


@pytest.mark.parametrize(("later_s", "is_aborted"), [(EARLY_ABORT_S - 1, True), (EARLY_ABORT_S + 1, False)])
def test_an_early_abort_counts_for_what_was_submitted_in_time_whenever_it_is_taken(
    door: Door, later_s: float, is_aborted: bool
) -> None:
    door.sock.sendall(m.encode_frame(m.Abort(1, ("r1",))))
    door.intake.take()
    door.intake.take()
    said = door.now + later_s
    door.send(1, said)
    door.now = said + 10
    door.intake.take()
    ends = [end.reason for output in door.chain.outputs() for end in output.finished]
    assert ends == ([FinishReason.ABORTED] if is_aborted else [])
