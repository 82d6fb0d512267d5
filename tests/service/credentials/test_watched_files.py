"""Files that are read again: a change is never missed, and what can't be read now is tried again."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.credentials import watched_files
from runahead.service.credentials.callers import CallersFile
from runahead.service.credentials.tls import TlsFiles, server_credentials
from runahead.service.credentials.watched_files import WatchedFiles
from tests.service.certificates import Authority

TIMEOUT_S = 10.0
ALICE, BOB = "alice-token-0123456789", "bobby-token-0123456789"


@contextmanager
def no_descriptor_free() -> Iterator[None]:
    """What a process meets that has as many files and connections open as it may."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/", os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def replace(path: Path, text: str) -> None:
    """The file appears whole."""
    (new := path.with_suffix(".new")).write_text(text)
    new.rename(path)


def known(callers: CallersFile) -> list[str]:
    return [token for token in (ALICE, BOB) if callers.by_token(token.encode()) is not None]


def callers_file(path: Path, token: str = ALICE) -> CallersFile:
    path.write_text(f"alice generate token {token}\n")
    return CallersFile(path)


@contextmanager
def once(monkeypatch: pytest.MonkeyPatch, target: str, function: Callable[..., Any], happens: Callable[[], Any]) -> Any:
    """Something happens right behind the first call of a function, which the target names."""
    calls: list[object] = []

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        calls.append(arguments)
        if len(calls) == 1:
            happens()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(target, wrapped)
        yield
    assert calls, "it was not called"


def test_callers_that_could_not_be_read_for_want_of_a_descriptor_are_read_when_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callers = callers_file(tmp_path / "callers")
    replace(tmp_path / "callers", f"bob generate token {BOB}\n")
    with no_descriptor_free():
        assert known(callers) == [ALICE], "what was in force stays"
        assert known(callers) == [ALICE]
    assert known(callers) == [BOB], "and whoever was taken away is gone"
    logged = "".join(capsys.readouterr())
    assert logged.count("callers_not_read") == 1 and logged.count("Too many open files") == 1
    assert logged.count("callers_read") == 1


def test_callers_are_read_again_whatever_the_time_of_modification_is_set_to(tmp_path: Path) -> None:
    path = tmp_path / "callers"
    path.write_text(f"alice generate token {ALICE}\n")
    os.utime(path, (1e9, 1e9))
    before = path.stat()
    callers = CallersFile(path)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a file system's clock ticks every few milliseconds
        path.write_text(f"alice generate token {BOB}\n")
        os.utime(path, (1e9, 1e9))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert known(callers) == [BOB]


def test_callers_that_are_written_to_while_they_are_read_are_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "callers"
    callers = callers_file(path)
    replace(path, f"alice generate token {ALICE}\nbatch generate certificate batch.exam")

    def rest() -> None:
        with path.open("a") as file:
            file.write("ple.org\n")

    with once(monkeypatch, "runahead.service.credentials.callers.sha256", sha256, rest):  # of alice's token
        assert callers.by_certificate(["batch.exam"]) is None
    assert callers.by_certificate(["batch.example.org"]) is not None


def test_files_that_never_stand_still_change_nothing_until_they_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    restless = False

    def read() -> str:
        text = path.read_text()
        if restless:
            path.write_text(text + "x")
        return text

    files = WatchedFiles((path,), read, "not_read")
    assert (files.refresh(), files.contents) == (False, "")
    path.write_text("x")
    restless = True
    assert [files.refresh() for _ in range(2)] == [False] * 2
    restless = False
    assert files.contents == "" and "change all the while" in "".join(capsys.readouterr())
    assert files.refresh() and files.contents == path.read_text()
    assert not files.refresh()


# ------------------------------------------------------------ certificates


class Handshakes:
    """What gRPC is given for the port: at the start, and at each handshake."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.files = TlsFiles(folder / "server.crt", folder / "server.key", folder / "clients.crt")
        made: dict[str, Any] = {}

        def configuration(pairs: Any, authorities: bytes) -> tuple[bytes, bytes]:
            return pairs[0][1], authorities

        def credentials(first: Any, newer: Any, **_: Any) -> None:
            made.update(first=first, newer=newer)

        monkeypatch.setattr(grpc, "ssl_server_certificate_configuration", configuration)
        monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", credentials)
        self._made = made

    def begin(self) -> Any:
        server_credentials(self.files, self.clock)
        return self._made["first"]

    def next(self) -> Any:
        return self._made["newer"]()


@pytest.fixture
def handshakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Handshakes:
    authority = Authority()
    authority.server().write(tmp_path, "server")
    (tmp_path / "clients.crt").write_bytes(authority.pem)
    return Handshakes(tmp_path, monkeypatch)


def test_certificates_that_could_not_be_read_for_want_of_a_descriptor_are_read_when_there_is_one(
    handshakes: Handshakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handshakes.begin()
    new = Authority("new")
    replace(tmp_path / "clients.crt", new.pem.decode())
    with no_descriptor_free():
        assert [handshakes.next() for _ in range(2)] == [None] * 2
    assert handshakes.next() == ((tmp_path / "server.crt").read_bytes(), new.pem), "an authority was taken away"
    assert handshakes.next() is None
    logged = "".join(capsys.readouterr())
    assert logged.count("certificate_not_read") == 1 and logged.count("Too many open files") == 1


def test_a_certificate_that_changes_while_the_server_begins_is_not_missed(
    handshakes: Handshakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Authority("new").server()
    made: Any = grpc.ssl_server_certificate_configuration
    with once(monkeypatch, "grpc.ssl_server_certificate_configuration", made, lambda: new.write(tmp_path, "server")):
        given = [handshakes.begin(), handshakes.next()]
    assert [pair[0] for pair in given if pair is not None][-1] == new.certificate


def test_a_key_that_changes_while_it_is_read_is_read_once_more(
    handshakes: Handshakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handshakes.begin()
    one, other = Authority("one").server(), Authority("other").server()
    one.write(tmp_path, "server")
    made: Any = grpc.ssl_server_certificate_configuration
    with once(monkeypatch, "grpc.ssl_server_certificate_configuration", made, lambda: other.write(tmp_path, "server")):
        assert handshakes.next()[0] == other.certificate


def test_files_that_can_not_be_read_at_the_start_are_refused(tmp_path: Path) -> None:
    callers_file(tmp_path / "callers")
    with no_descriptor_free(), pytest.raises(ConfigError, match="can't be read: Too many open files"):
        CallersFile(tmp_path / "callers")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        CallersFile(tmp_path)


# ------------------------------------------------------------ what blocks, and what expires


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_could_block_is_refused_and_changes_nothing_later_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "callers"
    callers = callers_file(path)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert known(callers) == [ALICE]
    assert "".join(capsys.readouterr()).count("it is not a regular file") == 1
    with pytest.raises(ConfigError, match=r"callers can't be read: it is not a regular file$"):
        CallersFile(path)
    with pytest.raises(ConfigError, match=r"callers can't be read: it is not a regular file$"):
        server_credentials(TlsFiles(path, path, None))
    replace(path, f"bob generate token {BOB}\n")
    assert known(callers) == [BOB]


def test_a_file_system_that_hangs_keeps_nobody_for_longer_than_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    answers = threading.Event()
    hanging = False

    def read() -> str:
        assert not hanging or answers.wait(TIMEOUT_S)
        return path.read_text()

    files = WatchedFiles((path,), read, "not_read")
    waited: list[float | None] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if event is not answers:
            waited.append(timeout)
        return wait(event, timeout)

    hanging = True
    replace(path, "new")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", noted)
        assert [files.refresh() for _ in range(3)] == [False] * 3
    assert (files.contents, waited) == ("old", [0.2, 0.0, 0.0])
    assert "".join(capsys.readouterr()).count("no answer in 0.2 s") == 1, "it is said once"
    answers.set()
    monkeypatch.setattr(watched_files, "_CHECK_S", TIMEOUT_S)
    assert files._is_checked.wait(TIMEOUT_S)
    assert files.refresh(), "one look that was late makes no other one late"
    assert files.contents == "new"
    replace(path, "newer")
    assert files.refresh() and files.contents == "newer"


def test_the_thread_of_files_that_nobody_has_any_more_ends(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    callers = callers_file(tmp_path / "callers")
    assert known(callers) == [ALICE]
    (thread,) = set(threading.enumerate()) - before
    del callers
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_what_an_editor_shows_as_one_line_is_one(tmp_path: Path, end: str) -> None:
    path = tmp_path / "callers"
    path.write_text(f"alice generate token {ALICE}\n# a comment{end}bob generate token {BOB}\n", newline="")
    assert known(CallersFile(path)) == [ALICE]
    path.write_text(f"alice generate token {ALICE}\r\nbob\tgenerate  token {BOB}\r\n", newline="")
    assert known(CallersFile(path)) == [ALICE, BOB]
    for line in (f"alice{end}generate token {ALICE}", f"batch generate certificate a{end}b"):
        path.write_text(line + "\n", newline="")
        with pytest.raises(ConfigError, match="line 1 of callers file"):
            CallersFile(path)


class Clock:
    """A time of day that a test sets."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


def test_a_certificate_that_has_expired_does_not_take_the_place_of_one_that_has_not(
    handshakes: Handshakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = handshakes.begin()
    Authority().server(days=-1).write(tmp_path, "server")
    assert [handshakes.next() for _ in range(3)] == [None] * 3
    logged = "".join(capsys.readouterr())
    assert logged.count("certificate_not_read") == 1 and "the one before stays in force" in logged
    new = Authority().server()
    new.write(tmp_path, "server")
    given = handshakes.next()
    assert given is not None and given[0] == new.certificate != first[0]


def test_a_certificate_that_expires_soon_or_has_expired_is_said_once(
    handshakes: Handshakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = handshakes.clock
    handshakes.begin()  # 30 days
    for days, event in ((15, ""), (3, "certificate_expires"), (1, ""), (13, "certificate_expired"), (1, "")):
        clock.now += timedelta(days=days)
        assert [handshakes.next() for _ in range(2)] == [None] * 2
        logged = "".join(capsys.readouterr())
        events = [name for name in ("certificate_expires", "certificate_expired") if name in logged]
        assert events == ([event] if event else []) and len(logged.splitlines()) == len(events)
    Authority().server(days=31).write(tmp_path, "server")
    assert handshakes.next() is not None, "both have expired: the new one it is"
