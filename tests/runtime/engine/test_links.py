"""The engine's sockets: greeted, bounded, never blocking."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from runahead.runtime.engine import links as links_module
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader
from tests.runtime.chain import nobody_is_refused
from tests.runtime.engine.sockets import WELCOME, connect, read, until


@pytest.fixture
def refused() -> list[tuple[int, str]]:
    """The front ends that were refused, each with the reason."""
    return []


@pytest.fixture
def links(tmp_path: Path, refused: list[tuple[int, str]]) -> Iterator[SocketLinks]:
    made = SocketLinks(tmp_path / "engine", WELCOME, lambda owner, why: refused.append((owner, why)))
    yield made
    made.close()


def test_a_front_end_is_greeted_and_heard(links: SocketLinks, tmp_path: Path) -> None:
    with connect(tmp_path) as sock:
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.Cancel(7)))
        assert until(links, 1) == [(1, m.Cancel(7))]
        assert read(sock) == WELCOME


@pytest.mark.parametrize("border", [1 << 31, 1 << 32])
def test_front_ends_and_their_handles_are_counted_across_a_border(tmp_path: Path, border: int) -> None:
    links = SocketLinks(tmp_path / "engine", WELCOME, nobody_is_refused, connected=border - 2)
    for owner in (border - 1, border, border + 1):
        with connect(tmp_path) as sock:
            sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.Cancel(owner + 5)))
            assert until(links, 1) == [(owner, m.Cancel(owner + 5))]
            assert read(sock) == WELCOME
            links.send(owner, m.Accepted(owner + 5))
            list(links.receive())
            assert read(sock) == m.Accepted(owner + 5)
        assert until(links, 1) == [(owner, None)]
    links.close()


def test_a_frame_in_pieces_is_one_message(links: SocketLinks, tmp_path: Path) -> None:
    data = m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(5))
    with connect(tmp_path) as sock:
        for i in range(len(data) - 1):
            sock.sendall(data[i : i + 1])
            links.wait(0.1)
            assert list(links.receive()) == []
        sock.sendall(data[-1:])
        assert until(links, 1) == [(1, m.StatsQuery(5))]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (m.encode_frame(m.Cancel(7)), "before its Hello"),
        (m.encode_frame(m.Hello(m.PROTOCOL_VERSION + 1)), "speaks protocol"),
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x03\x00\x00\x00abc", "unreadable"),
    ],
    ids=["no hello", "another version", "a frame over the limit", "not a message"],
)
def test_a_front_end_that_speaks_nonsense_is_gone_and_the_reason_is_told(
    links: SocketLinks, tmp_path: Path, refused: list[tuple[int, str]], data: bytes, word: str
) -> None:
    with connect(tmp_path) as sock:
        sock.sendall(data)
        assert until(links, 1) == [(1, None)]
    ((owner, why),) = refused
    assert owner == 1
    assert word in why


def test_a_front_end_that_closes_is_gone(links: SocketLinks, tmp_path: Path) -> None:
    connect(tmp_path).close()
    assert until(links, 1) == [(1, None)]


def test_a_front_end_that_says_hello_and_closes_at_once_hurts_nobody(links: SocketLinks, tmp_path: Path) -> None:
    with connect(tmp_path) as other:
        other.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        assert until(links, 1) == [(1, m.StatsQuery(1))]
        with connect(tmp_path) as sock:
            sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        assert until(links, 1) == [(2, None)], "it was gone before it could be greeted"
        other.sendall(m.encode_frame(m.StatsQuery(2)))
        assert until(links, 1) == [(1, m.StatsQuery(2))]


def test_what_a_front_end_asked_before_it_closed_comes_before_its_end(links: SocketLinks, tmp_path: Path) -> None:
    with connect(tmp_path) as sock:
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.Cancel(7)))
    assert until(links, 2) == [(1, m.Cancel(7)), (1, None)]


def test_a_message_to_a_front_end_that_is_gone_goes_nowhere(links: SocketLinks, tmp_path: Path) -> None:
    with connect(tmp_path) as sock:
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
    assert until(links, 1) == [(1, None)]
    links.send(1, m.Accepted(1))
    links.broadcast(m.Accepted(1))
    assert list(links.receive()) == []


def test_a_front_end_that_drains_nothing_is_gone_and_the_engine_never_waits(
    links: SocketLinks, tmp_path: Path, refused: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "MAX_UNSENT_BYTES", 1 << 20)
    with connect(tmp_path) as sock:
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        until(links, 1)
        for _ in range(64):
            links.send(1, m.Output(1, bytes(1 << 16), bytes(1 << 16)))
        assert until(links, 1) == [(1, None)]
    assert refused == [(1, f"a front end left more than {1 << 20} bytes unread")]


def wakes(links: SocketLinks) -> bool:
    """The engine wakes within a while, if it waits."""
    return bool(select.select(links.wake_fds(), [], [], 10)[0])


def sleeps(links: SocketLinks) -> bool:
    """The engine would wait."""
    return not select.select(links.wake_fds(), [], [], 0)[0]


def test_the_engine_wakes_for_a_new_front_end_and_for_what_each_one_sends(links: SocketLinks, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for owner in (1, 2, 3):
            assert sleeps(links)
            sock = stack.enter_context(connect(tmp_path))
            assert wakes(links)
            assert list(links.receive()) == []
            assert sleeps(links)
            sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(owner)))
            assert wakes(links)
            assert until(links, 1) == [(owner, m.StatsQuery(owner))]


def test_a_connection_that_is_lost_wakes_nobody(
    links: SocketLinks, tmp_path: Path, refused: list[tuple[int, str]]
) -> None:
    with connect(tmp_path) as stays:
        stays.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        assert until(links, 1) == [(1, m.StatsQuery(1))]
        watched = len(links._selector.get_map())
        for last_word in (b"", b"\xff\xff\xff\xff"):  # it closes, or is refused
            with connect(tmp_path) as goes:
                assert wakes(links)
                links.receive()
                goes.sendall(last_word)
                goes.shutdown(socket.SHUT_WR)
                assert [message for _, message in until(links, 1)] == [None]
            assert sleeps(links)
            assert len(links._selector.get_map()) == watched
        assert len(refused) == 1
        stays.sendall(m.encode_frame(m.StatsQuery(2)))
        assert until(links, 1) == [(1, m.StatsQuery(2))]


def test_what_a_full_socket_did_not_take_goes_when_there_is_room(links: SocketLinks, tmp_path: Path) -> None:
    outputs = [m.Output(launch, bytes(1 << 16), bytes(1 << 15)) for launch in range(1, 9)]
    with connect(tmp_path) as sock:
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        until(links, 1)
        assert read(sock) == WELCOME
        for output in outputs:
            links.send(1, output)
        assert links._connections[1].unsent, "the socket is full"
        assert sleeps(links)
        reader, heard = FrameReader(), list[m.ToFrontEnd]()
        while len(heard) < len(outputs):
            heard += [m.decode_to_front_end(body) for body in reader.feed(sock.recv(1 << 16))]
            links.receive()
        assert heard == outputs
        assert sleeps(links), "a socket with room in it is nothing to wake for"


def test_the_parents_end_is_seen(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    links = SocketLinks(tmp_path / "engine", WELCOME, nobody_is_refused, parent_fd=read_end)
    assert not links.parent_gone()
    os.close(write_end)
    links.wait(10)
    links.receive()
    assert links.parent_gone()
    assert sleeps(links), "it stays readable: the engine would wake for it again and again"
    links.close()
    os.close(read_end)


def test_closed_links_leave_no_socket_file(tmp_path: Path) -> None:
    made = SocketLinks(tmp_path / "engine", WELCOME, nobody_is_refused)
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_whoever_has_greeted_hears_now_and_again_that_the_loop_turns(tmp_path: Path) -> None:
    links = SocketLinks(tmp_path / "engine", WELCOME, nobody_is_refused, clock=lambda: 100.0)
    with connect(tmp_path) as sock, connect(tmp_path) as stranger:
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        until(links, 1)
        assert read(sock) == WELCOME
        for halves in range(1, 7):
            links.beat(100.0 + halves * m.HEARTBEAT_S / 2)
        links.send(1, m.Accepted(9))
        assert [read(sock) for _ in range(4)] == [*[m.Heartbeat()] * 3, m.Accepted(9)]
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
    links.close()
