"""What runs in namespaces of its own leaves nothing behind, however it and whoever started it end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.container import __main__ as container
from tests.container.confinement import CommandFailed, NotPermittedError, check_permission, confined
from tests.project.repository import ROOT

PATIENCE_S: Final = 60.0
# A command that mounts something, starts a process that holds a pipe, says so, and waits for it.
STAYS: Final = """
import os, subprocess, sys
folder, held, said = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
stays = subprocess.Popen(["sleep", "120"], pass_fds=[held], start_new_session=True)
os.write(said, b"mounted\\n")
stays.wait()
"""
STARTER: Final = """
import sys
from tests.container.confinement import confined
confined([sys.executable, "-c", *sys.argv[1:]], network=True, keep=[int(word) for word in sys.argv[3:]])
"""


def namespaces_are_permitted() -> bool:
    try:
        check_permission()
    except NotPermittedError:
        return False
    return True


needs_namespaces = pytest.mark.skipif(
    not namespaces_are_permitted(), reason="needs root and namespaces; `make container` fails without them"
)


@needs_namespaces
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_whoever_started_it_is_ended_and_nothing_is_left(tmp_path: Path, end: signal.Signals) -> None:
    held, writing = os.pipe()
    said, saying = os.pipe()
    arguments = [STAYS, str(tmp_path), str(writing), str(saying)]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *arguments], cwd=ROOT, pass_fds=[writing, saying])
    for descriptor in (writing, saying):
        os.close(descriptor)
    try:
        assert os.read(said, 100) == b"mounted\n"
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(), "others see its mount"
        starter.send_signal(end)
        starter.wait(PATIENCE_S)
        ended, _, _ = select.select([held], [], [], PATIENCE_S)
        assert ended, "what it has started still runs"
        assert os.read(held, 1) == b""
    finally:
        starter.kill()
        starter.wait()
        os.close(held)
        os.close(said)


@needs_namespaces
def test_a_process_that_a_command_leaves_behind_ends_with_it() -> None:
    held, writing = os.pipe()
    try:
        leaves = "import subprocess, sys; subprocess.Popen(['sleep', '120'], pass_fds=[int(sys.argv[1])])"
        confined([sys.executable, "-c", leaves, str(writing)], network=True, keep=[writing])
        os.close(writing)
        assert select.select([held], [], [], 0)[0], "it runs when `confined` has returned"
        assert os.read(held, 1) == b""
    finally:
        os.close(held)


@needs_namespaces
@pytest.mark.parametrize(("network", "says"), [(True, CommandFailed), (False, None)])
def test_without_a_network_there_is_none(network: bool, says: type[CommandFailed] | None) -> None:
    others = "import socket, sys; sys.exit([name for _, name in socket.if_nameindex()] != ['lo'])"
    if network and subprocess.run([sys.executable, "-c", others]).returncode == 0:
        pytest.skip("this machine has no network itself")
    if says is None:
        confined([sys.executable, "-c", others], network=network)
    else:
        with pytest.raises(says, match="exit 1"):
            confined([sys.executable, "-c", others], network=network)


def refuse_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 10001)


def refuse_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.container.confinement._UNSHARE", ("false",))


@pytest.mark.parametrize("refuse", [refuse_root, refuse_namespaces])
def test_where_it_is_not_permitted_the_run_fails(
    refuse: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    refuse(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["tests.container", "--folder", str(tmp_path / "folder")])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert container.main() == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "a clean root needs root" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists(), "nothing was tried"


def test_the_folder_of_a_run_is_empty_at_first_and_gone_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "work/etc").mkdir(parents=True)
    with container.work_folder(tmp_path) as (work, _):
        assert not list(work.iterdir()), "what a run has left that was killed"
        (work / "etc").mkdir()
    assert not work.exists()
