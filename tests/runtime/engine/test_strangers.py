"""Whoever connects to the engine is a stranger until it has greeted, and is never believed how much it will say."""

from __future__ import annotations

import contextlib
import resource
import select
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from runahead.runtime.engine.links import HELLO_BYTES, HELLO_S, READS, SocketLinks
from runahead.runtime.engine.submit_check import check_message, frame_bound
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import MAX_FRAME_BYTES, ProtocolError
from runahead.runtime.wire.parameters import (
    MAX_ABORT_IDS,
    MAX_BIAS,
    MAX_STOP_IDS,
    MAX_STRUCTURE,
    MAX_TEXT,
    SamplingParams,
    StoppingParams,
)
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.engine.sockets import INFO, WELCOME, Clock, connect, read, until


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refused() -> list[tuple[int, str]]:
    """The front ends that were refused, each with the reason."""
    return []


@pytest.fixture
def links(tmp_path: Path, refused: list[tuple[int, str]], clock: Clock) -> Iterator[SocketLinks]:
    made = SocketLinks(tmp_path / "engine", WELCOME, lambda owner, why: refused.append((owner, why)), clock=clock)
    yield made
    made.close()


@contextlib.contextmanager
def descriptors(most: int) -> Iterator[None]:
    """This process may have so many open meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_however_many_connect_a_front_end_is_heard_and_the_silent_ones_go(
    links: SocketLinks, clock: Clock, tmp_path: Path, refused: list[tuple[int, str]]
) -> None:
    many = 1100  # more than `select` can take
    with descriptors(4 * many), contextlib.ExitStack() as stack:
        socks = []
        for _ in range(many):
            socks.append(stack.enter_context(connect(tmp_path)))
            links.wait(10)
            assert list(links.receive()) == []
        assert max(sock.fileno() for sock in socks) > 1023
        last = socks[-1]
        last.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        assert until(links, 1) == [(many, m.StatsQuery(1))]
        assert read(last) == WELCOME
        clock.now += HELLO_S
        assert sorted(until(links, many - 1)) == [(owner, None) for owner in range(1, many)]
        assert {why for _, why in refused} == {"it said no Hello within 1 s"}
        last.sendall(m.encode_frame(m.StatsQuery(2)))
        assert until(links, 1) == [(many, m.StatsQuery(2))]


def test_who_has_not_said_hello_in_time_is_gone_and_who_has_stays(
    links: SocketLinks, clock: Clock, tmp_path: Path, refused: list[tuple[int, str]]
) -> None:
    hello = m.encode_frame(m.Hello(m.PROTOCOL_VERSION))
    with connect(tmp_path) as half, connect(tmp_path) as whole, connect(tmp_path) as late:
        for _ in range(3):
            links.receive()
        half.sendall(hello[:-1])
        whole.sendall(hello)
        clock.now += HELLO_S / 2
        links.wait(10)
        assert list(links.receive()) == []
        assert read(whole) == WELCOME
        clock.now += HELLO_S / 2
        late.sendall(hello)  # it is there before it is looked for
        assert until(links, 1) == [(1, None)]
        assert refused == [(1, "it said no Hello within 1 s")]
        assert half.recv(1) == b""
        assert read(late) == WELCOME
        clock.now += 10 * HELLO_S
        for sock in (whole, late):
            sock.sendall(m.encode_frame(m.StatsQuery(5)))
        assert sorted(until(links, 2)) == [(2, m.StatsQuery(5)), (3, m.StatsQuery(5))]


def test_without_a_descriptor_for_a_connection_the_engine_does_not_wake_for_it_again_and_again(
    links: SocketLinks, clock: Clock, tmp_path: Path, refused: list[tuple[int, str]]
) -> None:
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(connect(tmp_path))
        known.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        for _ in range(2):  # it is accepted, and then read
            assert list(links.receive()) == []
        assert read(known) == WELCOME
        waits = stack.enter_context(connect(tmp_path))
        with descriptors(known.fileno()):  # below those that are open: there is none for another
            links.receive()
        assert refused == [(2, "there is no descriptor for its connection: Too many open files")]
        assert select.select(links.wake_fds(), [], [], 0)[0] == []
        known.sendall(m.encode_frame(m.StatsQuery(1)))
        assert until(links, 1) == [(1, m.StatsQuery(1))], "the others are heard meanwhile"
        clock.now += 1
        waits.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(2)))
        assert until(links, 1) == [(2, m.StatsQuery(2))]


def test_a_turn_reads_some_connections_and_the_next_turn_those_that_waited(links: SocketLinks, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(tmp_path)) for _ in range(READS + 8)]
        for sock in socks:
            sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        until(links, len(socks))
        for sock in socks:
            sock.sendall(m.encode_frame(m.StatsQuery(2)))
        first, second = list(links.receive()), list(links.receive())
        assert (len(first), len(second)) == (READS, 8)
        assert sorted(owner for owner, _ in first + second) == list(range(1, len(socks) + 1))


@pytest.mark.parametrize("has_greeted", [False, True])
def test_a_frame_over_the_bound_is_refused_by_its_length_before_it_is_read(
    links: SocketLinks, tmp_path: Path, refused: list[tuple[int, str]], has_greeted: bool
) -> None:
    bound = frame_bound(INFO) if has_greeted else HELLO_BYTES
    with connect(tmp_path) as sock:
        if has_greeted:
            sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        sock.sendall((bound + 1).to_bytes(4, "little"))
        assert until(links, 1) == [(1, None)]
    assert refused == [(1, f"a frame of {bound + 1} bytes is over the limit of {bound}")]


def test_the_largest_messages_are_within_the_bound_of_a_frame() -> None:
    info = msgspec.structs.replace(INFO, vocab_size=1 << 17, context_length=1 << 12, prefix_cache=True, structures=True)
    ids = np.arange(info.context_length - 1, dtype=np.int32)
    sampling = SamplingParams(
        seed=(1 << 63) - 1,
        repetition_penalty=1.5,
        bias_ids=tuple(range(1 << 16, (1 << 16) + MAX_BIAS)),
        bias_values=(0.1,) * MAX_BIAS,
        allowed_mask=b"\x01" * (info.vocab_size // 8),
    )
    stopping = StoppingParams(1 << 20, stop_token_ids=tuple(range(1 << 16, (1 << 16) + MAX_STOP_IDS - 1)))
    character = "\N{FACE WITH TEARS OF JOY}"
    text, grammar, size = character * MAX_TEXT, character * MAX_STRUCTURE, info.block_size
    submit = prepared_submit(
        1 << 40, text, ids, sampling, stopping, block_size=size, cache_salt=text, structure=grammar
    )
    abort = m.Abort(1 << 40, (text,) * MAX_ABORT_IDS)
    for message in (submit, abort):
        check_message(message, info, 0)
        assert len(m.encode_frame(message)) < frame_bound(info) < MAX_FRAME_BYTES


def test_a_grammar_has_a_bound_and_goes_beside_nothing_that_keeps_it_from_ending() -> None:
    follows = msgspec.structs.replace(INFO, structures=True)

    def asked(structure: str, *, ignore_eos: bool = False) -> m.Submit:
        stopping = StoppingParams(5, ignore_eos=ignore_eos)
        return prepared_submit(
            1, "r", np.ones(3, np.int32), SamplingParams(), stopping, block_size=0, structure=structure
        )

    check_message(asked("{}"), follows, 0)
    with pytest.raises(ProtocolError, match="has a grammar and ignore_eos"):
        check_message(asked("{}", ignore_eos=True), follows, 0)
    m.decode_to_engine(m.encode_frame(asked("x" * MAX_STRUCTURE))[4:])
    with pytest.raises(ProtocolError, match="length <= 262144"):
        m.decode_to_engine(m.encode_frame(asked("x" * (MAX_STRUCTURE + 1)))[4:])
