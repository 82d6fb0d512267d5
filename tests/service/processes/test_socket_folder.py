"""The folder of the engine's socket: private, locked, and gone sooner or later whatever dies."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runahead.service.processes import socket_folder
from runahead.service.processes.socket_folder import SocketFolder

OWNER = """
import asyncio, sys
from runahead.runtime.log_output import LogOutput
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes.socket_folder import EngineProcess

async def main():
    engine = await EngineProcess.start(EngineConfig(model="/nowhere"), LogOutput(), [sys.executable, sys.argv[1]])
    print(engine.socket.parent, engine._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
ENGINE = """
import json, socket, sys
socket.socket(socket.AF_UNIX).bind(json.loads(sys.stdin.readline())["socket"])
print("ready", flush=True)
while True:
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders are made and looked for in here alone."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(socket_folder, "_SHORT_FOLDERS", ())
    return temporary


def test_only_its_user_can_enter_it_and_it_goes_with_its_socket(places: Path) -> None:
    folder = SocketFolder.make()
    assert stat.S_IMODE(folder.socket.parent.stat().st_mode) == 0o700
    assert folder.socket.parent.parent == places
    folder.socket.touch()
    folder.remove()
    folder.remove()
    assert list(places.iterdir()) == []


def test_what_two_killed_processes_left_is_gone_at_the_next_start(places: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "engine.py")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(places)},
    )
    assert owner.stdout is not None
    with owner.stdout:
        left, engine = owner.stdout.readline().split()
    beside = SocketFolder.make()
    assert Path(left).is_dir(), "a folder whose owner lives stays"
    owner.kill()
    os.kill(int(engine), signal.SIGKILL)
    owner.wait()
    assert list(Path(left).iterdir()) == [Path(left, "engine.sock")], "nobody has taken it away"
    folder = SocketFolder.make()
    assert sorted(places.iterdir()) == sorted([beside.socket.parent, folder.socket.parent])
    folder.remove()
    beside.remove()


def test_what_is_no_folder_of_an_engine_that_was_killed_stays(places: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    (places / "runahead-engine-link").symlink_to(kept)
    (places / "runahead-engine-file").touch()
    open_to_others = places / "runahead-engine-open"
    open_to_others.mkdir(mode=0o755)
    filled = places / "runahead-engine-filled"
    filled.mkdir(mode=0o700)
    (filled / "notes").touch()
    before = sorted(places.rglob("*"))
    SocketFolder.make().remove()
    assert sorted(places.rglob("*")) == before
    assert kept.is_dir()


def test_a_folder_that_another_start_takes_away_before_it_is_locked_is_made_again(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def mkdtemp(prefix: str, dir: str) -> str:
        made.append(real(prefix=prefix, dir=dir))
        if len(made) == 1:
            socket_folder._remove_what_was_left(places)
        return made[-1]

    real = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    folder = SocketFolder.make()
    assert [str(folder.socket.parent)] == made[1:]
    assert folder.socket.parent.is_dir() and not Path(made[0]).exists()
    folder.remove()
