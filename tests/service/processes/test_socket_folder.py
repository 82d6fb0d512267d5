"""The folder of the engine's socket: private, and gone with its maker."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from runahead.service.processes import socket_folder
from runahead.service.processes.socket_folder import make_socket_folder, remove_socket_folder


def test_only_its_user_can_enter_it_and_it_goes_with_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "t"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    monkeypatch.setattr(socket_folder, "_SHORT_FOLDERS", ())
    socket = make_socket_folder()
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert socket.parent.parent == places
    socket.touch()
    (socket.parent / "notes").touch()
    remove_socket_folder(socket)
    assert [path.name for path in socket.parent.iterdir()] == ["notes"], "what it did not make stays"
    (socket.parent / "notes").unlink()
    remove_socket_folder(socket)
    remove_socket_folder(socket)
    assert list(places.iterdir()) == []
