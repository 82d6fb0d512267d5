"""Logs: for people on a terminal, JSON elsewhere, from the least severe level that was asked for, in both processes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.local_service import BESIDE

QUICK = ("--threads", "1", "--num-blocks", "600")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
JSON_LINE = re.compile(r"^\{.*\}$", re.M)


def terminal(reader: int) -> Iterator[str]:
    """Lines that a process writes to a terminal, until its end, without their colours."""
    rest = b""
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (ESCAPE.sub("", line.decode().rstrip("\r")) for line in lines)


def until_serving_on_a_terminal(*flags: str) -> list[str]:
    """What `runahead serve` writes to a terminal, stopped as soon as it serves."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "runahead", "serve", "--port", "0", *QUICK, *BESIDE, *flags]
    with subprocess.Popen(command, stdout=writer, stderr=writer) as process:
        os.close(writer)
        lines = []
        try:
            for line in terminal(reader):
                lines.append(line)
                if "serving" in line.split() or '"event": "serving"' in line:
                    process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "\n".join(lines)
        finally:
            process.kill()
    os.close(reader)
    return lines


def test_on_a_terminal_both_processes_log_for_people() -> None:
    text = "\n".join(until_serving_on_a_terminal())
    assert re.search(r"^\d\d:\d\d:\d\d \[info +\] engine_ready ", text, re.M), "the engine's"
    assert re.search(r"^\d\d:\d\d:\d\d \[info +\] serving ", text, re.M), "the front end's"
    assert not JSON_LINE.search(text)


def test_json_can_be_asked_for_on_a_terminal() -> None:
    events = [json.loads(line)["event"] for line in until_serving_on_a_terminal("--log-format", "json")]
    assert {"engine_ready", "serving"} <= set(events)


def test_elsewhere_both_processes_log_json_from_the_level_that_was_asked_for() -> None:
    command = [sys.executable, "-m", "runahead", "serve", "--port", "0", *QUICK, *BESIDE, "--log-level", "warning"]
    command += ["--log-interval", "1", "--log-mode", "barrier"]  # which the engine warns of at its start
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0
    events = [json.loads(line) for line in (first + rest).splitlines()]
    assert [event["event"] for event in events] == ["serial"]
    assert events[0]["level"] == "warning"


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_shows_no_local_variable(form: str) -> None:
    script = (
        "import structlog; from runahead.runtime.log_output import LogOutput, log_to_stderr\n"
        f"log_to_stderr(LogOutput(format={form!r}))\n"
        "def fail(prompt):\n    raise ValueError('broken')\n"
        "try:\n    fail('sec' + 'ret')\nexcept ValueError:\n    structlog.get_logger().exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "ValueError: broken" in done.stderr
    assert "secret" not in done.stderr


def test_a_console_that_is_no_terminal_gets_no_colours(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import structlog; from runahead.runtime.log_output import LogOutput, log_to_stderr\n"
        "log_to_stderr(LogOutput(format='console'))\nstructlog.get_logger().info('written', to='a file')\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
    written = capfd.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info +\] written +to='a file'\n", written)


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_event_has_a_character_that_a_terminal_acts_on(form: str) -> None:
    script = (
        "import structlog; from runahead.runtime.log_output import LogOutput, log_to_stderr\n"
        f"log_to_stderr(LogOutput(format={form!r}))\n"
        "words = chr(27) + ']0;t' + chr(7) + chr(0x9b) + '2J' + chr(10) + '12:00:00 [info] forged'\n"
        "structlog.get_logger().info('call' + words, method=words, short=chr(27), many=[words], code='OK')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "]0;t" in done.stderr and "code" in done.stderr
    assert done.stderr.endswith("\n") and done.stderr[:-1].isprintable(), "one line that can be shown"
