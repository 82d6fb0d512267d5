"""The folder of the engine's socket: private, and gone with its maker."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from runahead.service.processes import socket_folder
from runahead.service.processes.socket_folder import SocketFolder, make_socket_folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    places = tmp_path / "t"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    monkeypatch.setattr(socket_folder, "_SHORT_FOLDERS", ())
    return places


def test_only_its_user_can_enter_it_and_it_goes_with_its_socket(places: Path) -> None:
    folder = make_socket_folder()
    socket = folder.socket
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert socket.parent.parent == places
    socket.touch()
    (socket.parent / "notes").touch()
    folder.remove()
    assert [path.name for path in socket.parent.iterdir()] == ["notes"], "what it did not make stays"
    (socket.parent / "notes").unlink()
    folder.remove()
    folder.remove()
    assert list(places.iterdir()) == []


def test_the_next_start_removes_what_killed_processes_left_and_nothing_else(places: Path, tmp_path: Path) -> None:
    served, loaded, running, starting, noted = (make_socket_folder() for _ in range(5))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (served.socket, running.socket, noted.socket.with_name("notes"), elsewhere / running.socket.name):
        path.touch()
    (places / running.socket.parent.name[:-1]).symlink_to(elsewhere)
    (places / starting.socket.parent.name[:-1]).touch()
    for folder in (served, loaded, noted):
        os.close(folder._lock)  # as the death of its maker does
    kept = set(places.rglob("*")) - {served.socket, served.socket.parent, loaded.socket.parent}
    new = make_socket_folder()
    assert set(places.rglob("*")) == kept | {new.socket.parent}
    assert (elsewhere / running.socket.name).exists()
    for folder in (running, starting, new):
        folder.remove()


def test_a_start_finds_no_folder_that_another_has_made_and_not_locked_yet(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = socket_folder._lock, list[SocketFolder]()

    def late(folder: int) -> None:
        monkeypatch.setattr(socket_folder, "_lock", lock)
        others.append(make_socket_folder())
        lock(folder)

    monkeypatch.setattr(socket_folder, "_lock", late)
    folder = SocketFolder(str(places))
    assert folder.socket.parent.is_dir()
    for made in (folder, *others):
        made.remove()
