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
from tests.runtime.chain import nobody_is_refused

INFO = m.EngineInfo("m", "a", 10, 20, (1,), -1, 2, 3, 4, 16, 2, "cpu", "float32", 5)
WELCOME = m.Welcome(m.PROTOCOL_VERSION, "server", INFO)


@pytest.fixture
def refused() -> list[tuple[int, str]]:
    """The front ends that were refused, each with the reason."""
    return []


@pytest.fixture
def links(tmp_path: Path, refused: list[tuple[int, str]]) -> Iterator[SocketLinks]:
    made = SocketLinks(tmp_path / "engine", lambda: WELCOME, lambda owner, why: refused.append((owner, why)))
    yield made
    made.close()


def connect(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(tmp_path / "engine"))
    return sock


def until(links: SocketLinks, count: int) -> list[tuple[int, m.ToEngine | None]]:
    """Take what arrives until there are `count` messages."""
    arrived: list[tuple[int, m.ToEngine | None]] = []
    for _ in range(100):
        links.wait(0.1)
        arrived += list(links.receive())
        if len(arrived) >= count:
            return arrived
    raise AssertionError(f"{len(arrived)} of {count} messages arrived")


def until_refused(links: SocketLinks, refused: list[tuple[int, str]]) -> tuple[int, str]:
    """Take what arrives until somebody is refused."""
    for _ in range(100):
        if refused:
            return refused[0]
        links.wait(0.1)
        assert list(links.receive()) == []
    raise AssertionError("nobody was refused")


def read(sock: socket.socket) -> m.ToFrontEnd:
    reader = m.FrameReader()
    bodies: list[bytes] = []
    while not bodies:
        bodies = reader.feed(sock.recv(1))
    return m.decode_to_front_end(bodies[0])


def test_a_front_end_is_greeted_and_heard(links: SocketLinks, tmp_path: Path) -> None:
    with connect(tmp_path) as sock:
        sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.Cancel(7)))
        assert until(links, 1) == [(1, m.Cancel(7))]
        assert read(sock) == WELCOME


@pytest.mark.parametrize("border", [1 << 31, 1 << 32])
def test_front_ends_and_their_handles_are_counted_across_a_border(tmp_path: Path, border: int) -> None:
    links = SocketLinks(tmp_path / "engine", lambda: WELCOME, nobody_is_refused, connected=border - 2)
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


def test_more_front_ends_than_may_be_are_refused_and_the_others_are_served(
    links: SocketLinks, tmp_path: Path, refused: list[tuple[int, str]]
) -> None:
    most = links_module.MAX_FRONT_ENDS
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(tmp_path)) for _ in range(most)]
        for sock in socks:
            sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        assert sorted(until(links, most)) == [(owner, m.StatsQuery(1)) for owner in range(1, most + 1)]
        extra = stack.enter_context(connect(tmp_path))
        assert until_refused(links, refused) == (
            most + 1,
            f"{most} front ends are connected already, as many as may be",
        )
        assert extra.recv(1) == b""
        socks[0].close()
        assert until(links, 1) == [(1, None)]
        later = stack.enter_context(connect(tmp_path))
        later.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(2)))
        assert until(links, 1) == [(most + 2, m.StatsQuery(2))], "there is room again"
        socks[1].sendall(m.encode_frame(m.StatsQuery(3)))
        assert until(links, 1) == [(2, m.StatsQuery(3))]
    assert len(refused) == 1


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


def arrived(links: SocketLinks) -> list[int]:
    """Descriptors by which the engine wakes, once there are any that are readable."""
    return select.select(links.wake_fds(), [], [], 10)[0]


def test_the_engine_wakes_for_a_new_front_end_and_for_what_each_one_sends(links: SocketLinks, tmp_path: Path) -> None:
    (listener,) = links.wake_fds()
    watched = [listener]
    with contextlib.ExitStack() as stack:
        for owner in (1, 2, 3):
            sock = stack.enter_context(connect(tmp_path))
            assert arrived(links) == [listener]
            assert list(links.receive()) == []
            (new,) = set(links.wake_fds()) - set(watched)
            watched.append(new)
            assert sorted(links.wake_fds()) == sorted(watched), "the others are watched as before"
            sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(owner)))
            assert arrived(links) == [new]
            assert until(links, 1) == [(owner, m.StatsQuery(owner))]


def test_a_connection_that_is_lost_is_watched_by_nobody(
    links: SocketLinks, tmp_path: Path, refused: list[tuple[int, str]]
) -> None:
    (listener,) = links.wake_fds()
    with connect(tmp_path) as stays:
        stays.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)) + m.encode_frame(m.StatsQuery(1)))
        assert until(links, 1) == [(1, m.StatsQuery(1))]
        before = sorted(links.wake_fds())
        for last_word in (b"", b"\xff\xff\xff\xff"):  # it closes, or is refused
            with connect(tmp_path) as goes:
                assert arrived(links) == [listener]
                links.receive()
                assert len(links.wake_fds()) == len(before) + 1
                goes.sendall(last_word)
                goes.shutdown(socket.SHUT_WR)
                assert [message for _, message in until(links, 1)] == [None]
            assert sorted(links.wake_fds()) == before
            assert links._poll.poll(0) == [], "a descriptor that is closed, and watched, has an event"
        assert len(refused) == 1
        stays.sendall(m.encode_frame(m.StatsQuery(2)))
        assert until(links, 1) == [(1, m.StatsQuery(2))]


def test_the_parents_end_is_seen(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    links = SocketLinks(tmp_path / "engine", lambda: WELCOME, nobody_is_refused, parent_fd=read_end)
    assert not links.parent_gone
    os.close(write_end)
    links.wait(10)
    links.receive()
    assert links.parent_gone
    assert read_end not in links.wake_fds(), "it stays readable: the engine would wake for it again and again"
    links.close()
    os.close(read_end)


def test_closed_links_leave_no_socket_file(tmp_path: Path) -> None:
    made = SocketLinks(tmp_path / "engine", lambda: WELCOME, nobody_is_refused)
    made.close()
    assert list(tmp_path.iterdir()) == []
