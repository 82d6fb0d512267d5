"""Standard error as a stream: nobody waits for whoever reads it, and nobody fails with it."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runahead.runtime.log_output import LogStream

PIPE_BYTES = 4096
LINE = "x" * 99 + "\n"
END_S = 60.0
FULL = Path("/dev/full")

Pipe = tuple[io.FileIO, int]  # its reader, and its writer's descriptor


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A small one."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with os.fdopen(reader, "rb", buffering=0) as file:
        yield file, writer
        os.close(writer)


def run(script: str, **redirected: int) -> subprocess.CompletedProcess[str]:
    begin = "import sys; from runahead.runtime.log_output import *\nstream_stderr()\n"
    return subprocess.run([sys.executable, "-c", begin + script], text=True, timeout=END_S, **redirected)  # type: ignore[call-overload]


@pytest.mark.parametrize("blocks", [True, False])
def test_nobody_waits_for_a_reader_that_does_not_read_and_what_has_no_room_is_counted(pipe: Pipe, blocks: bool) -> None:
    reader, writer = pipe
    os.set_blocking(writer, blocks)
    stream = LogStream(writer, most_bytes=10 * len(LINE))
    for _ in range(200):  # the pipe takes 40 or 41, and the buffer 10 beside the one that is being written
        assert stream.write(LINE) == len(LINE)
    kept = 200 - stream.dropped
    assert 10 <= kept <= 60
    read = b"".join(reader.read(len(LINE)) or b"" for _ in range(kept))
    stream.end()
    assert read.decode() == LINE * kept
    assert stream.dropped == 200 - kept


def test_a_line_that_nobody_can_take_is_dropped_and_the_next_is_tried_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    first = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    os.close(first)
    stream = LogStream(writer)
    stream.write("one\ntwo\n")
    while not stream.dropped:
        pass
    assert stream.dropped == 2
    second = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    stream.write("three\n")
    stream.end()
    assert (os.read(second, 100), stream.dropped) == (b"three\n", 2)
    os.close(second)
    os.close(writer)


def test_a_line_behind_one_that_was_cut_off_begins_anew(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        done = run(
            "import resource\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (6, resource.RLIM_INFINITY))\n"
            "sys.stderr.write('one\\n'); sys.stderr.write('two and three\\n')\n"
            "while not sys.stderr.dropped: pass\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
            "sys.stderr.write('four\\n')\n",
            stderr=file.fileno(),
        )
    assert done.returncode == 0
    assert (tmp_path / "log").read_text() == "one\ntw\nfour\n"


def test_what_is_written_at_the_end_is_there_and_a_stalled_reader_holds_no_exit(pipe: Pipe) -> None:
    reader, writer = pipe
    done = run("print('one', 'two', file=sys.stderr)\nraise ValueError('broken')", stderr=subprocess.PIPE)
    assert done.stderr.startswith("one two\nTraceback") and done.stderr.endswith("ValueError: broken\n")
    assert run(f"sys.stderr.write({LINE!r} * 1000)", stderr=writer).returncode == 0
    assert reader.read(len(LINE)) == LINE.encode()


@pytest.mark.parametrize("end", ["", "end_log(); import os; os._exit(0)"])
def test_a_full_disk_takes_nothing_but_the_lines(end: str) -> None:
    with FULL.open("wb") as full:
        done = run(
            "print('one', file=sys.stderr)\nwhile not sys.stderr.dropped: pass\n"
            f"print(sys.stderr.dropped, flush=True)\n{end}",
            stderr=full.fileno(),
            stdout=subprocess.PIPE,
        )
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_an_event_that_cannot_be_written_raises_nothing() -> None:
    script = (
        "import structlog; from runahead.runtime.log_output import LogOutput, log_to_stderr\n"
        "log_to_stderr(LogOutput(format='json')); structlog.get_logger().info('event'); print('went on')"
    )
    with FULL.open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full.fileno(), text=True, timeout=END_S
        )
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_a_process_without_standard_error_has_a_log_that_goes_nowhere() -> None:
    command = [sys.executable, "-c", "from runahead.runtime.log_output import *; stream_stderr(); import sys\n"]
    command[-1] += "print('words', file=sys.stderr); print(sys.stderr.fileno())"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, text=True, timeout=END_S
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), "no other file gets its number"


def test_dropped_lines_are_counted_beside_those_that_are_counted_already(pipe: Pipe) -> None:
    _, writer = pipe
    stream = LogStream(writer, most_bytes=0)
    stream.write("one\ntwo\n")
    cell = memoryview(bytearray(8)).cast("q")
    cell[0] = 10
    stream.count_in(cell)
    stream.write("three\n")
    assert (cell[0], stream.dropped) == (13, 13)
    stream.end()
    stream.write("behind the end\n")
    assert stream.dropped == 14
