"""What the system says of processes and connections, and how all processes of a service get to know it."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from runahead.service.shared_memory.board import Board, ProcessFigures, open_connections, process_figures

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "{sl:4d}: {local}:{port:04X} {remote}:{other:04X} {state} 00000000:00000000 00:00000000 00000000  1000 0 1\n"
ESTABLISHED, LISTENING = "01", "0A"
PORT = 50051


def table(*lines: tuple[int, int, str], address: str) -> str:
    """lines: the port of either end, and the state."""
    rows = (
        LINE.format(sl=12_340 + at, local=address, remote=address, port=port, other=other, state=state)
        for at, (port, other, state) in enumerate(lines)
    )
    return HEAD + "".join(rows)


def test_connections_are_those_to_the_port_that_are_open_by_either_protocol(tmp_path: Path) -> None:
    four = table(
        (PORT, 40000, ESTABLISHED),
        (PORT, 40001, ESTABLISHED),
        (PORT, 0, LISTENING),
        (40000, PORT, ESTABLISHED),  # the other end of one
        (PORT + 1, 40002, ESTABLISHED),
        address="0100007F",
    )
    (tmp_path / "tcp").write_text(four)
    assert open_connections(PORT, tmp_path) == 2
    (tmp_path / "tcp6").write_text(table((PORT, 40000, ESTABLISHED), address="0" * 24 + "01000000"))
    assert open_connections(PORT, tmp_path) == 3
    assert open_connections(PORT, tmp_path / "nowhere") == 0


def test_a_connection_of_this_machine_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert open_connections(port) == 0
        with socket.create_connection(("127.0.0.1", port)):
            assert open_connections(port) == 1


ADOPTED = """
import ctypes, os, subprocess
from runahead.service.processes.children import Orphans, _ended_children
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans become this process's, as PID 1's
orphans = Orphans()
orphans.reap([])
own = [subprocess.Popen(["true"]) for _ in range(2)]
for _ in range(3):
    subprocess.run(["sh", "-c", "(exit 3) & exit 0"], check=True)
while len(set(_ended_children())) < 5:
    pass
orphans.reap([own[0].pid])
print(len(set(_ended_children())))
assert own[1].wait() == 0  # somebody waits for it, as for every child of ours
orphans.reap([own[0].pid])
print(set(_ended_children()) == {own[0].pid}, own[0].wait(), own[1].wait())
"""


def test_orphans_are_reaped_and_no_child_that_somebody_waits_for() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "5\nTrue 0 0\n"


def test_of_processes_those_are_found_that_live(tmp_path: Path) -> None:
    with tempfile.TemporaryFile():
        (found,) = process_figures([("supervisor", os.getpid()), ("engine", 1 << 30)])
    assert (found.name, found.pid) == ("supervisor", os.getpid())
    assert found.resident_bytes > 1 << 20, "a Python has some megabytes"
    before = found.descriptors
    with tempfile.TemporaryFile():
        (found,) = process_figures([("supervisor", os.getpid())])
    assert found.descriptors == before, "it was open then, too"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("")
    assert list(process_figures([("engine", 7)], tmp_path)) == [], "it is ending: its memory is gone"


def test_every_process_reads_what_one_has_written() -> None:
    with tempfile.TemporaryFile() as memory:
        memory.truncate(Board.size(2))
        writer, reader = Board(2, memory.fileno()), Board(2, memory.fileno())
        assert reader.processes.read() == ()
        front_end = ProcessFigures("front_end_2", 12, 1 << 40, 17)
        engine = ProcessFigures("engine", 11, 5, 6)
        writer.processes.write(iter([front_end, engine]), 9)
        assert reader.processes.read() == (engine, front_end)
        assert reader.processes.connections == 9
        writer.processes.write(iter([engine]), 8)
        assert reader.processes.read() == (engine,), "the other one has ended"
        for name, count in (("engine", 3), ("supervisor", 4)):
            place = reader.dropped_lines_index(name)
            writer.processes.dropped_lines(name)[0] = count
            assert memoryview(mmap.mmap(memory.fileno(), 0)).cast("q")[place] == count
        assert reader.processes.read() == (replace(engine, log_lines_dropped=3),)
        writer.processes.write(iter([engine]), 8)
        engine = replace(engine, log_lines_dropped=3)
        line = writer.line(1)
        line.unread_bytes, line.stats_watchers, line.refused = 48, 3, 5
        assert reader.processes.read() == (engine,)
        reader.clear(1)
        total = writer.total()
        assert (total.unread_bytes, total.stats_watchers, total.refused) == (0, 0, 5)
