"""However a command ends, it says why in a sentence: output that can't be written, input without an end, Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runahead.service import cli
from runahead.service.commands import chat_command, request_flags, trace_command
from runahead.service.commands.request_flags import UsageError
from runahead.service.settings.settings import FrontEndSettings
from tests.service.commands.test_trace_command import MADE_UP
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.running_service import Service

RUNAHEAD = (sys.executable, "-m", "runahead")
FULL = "runahead: standard output can't be written: No space left on device\n"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, settings=FrontEndSettings(request_log=False)) as running:
        yield running


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """RUNAHEAD stands for the command."""
    command = command.replace("RUNAHEAD", f"'{sys.executable}' -m runahead")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", ["--version", "models", "completion bash"])
def test_what_needs_no_service_says_that_a_full_output_can_not_be_written(command: str) -> None:
    done = in_shell(f"RUNAHEAD {command} > /dev/full")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("command", ["stats --once", "stats", "stats --json", "abort some-id"])
def test_a_client_says_that_a_full_output_can_not_be_written(service: Service, command: str) -> None:
    done = in_shell(f"RUNAHEAD {command} --url 127.0.0.1:{service.port} > /dev/full")
    assert (done.returncode, done.stderr) == (1, FULL)
    silent = in_shell(f"RUNAHEAD {command} --url 127.0.0.1:{service.port} > /dev/full 2> /dev/full")
    assert silent.returncode == 1


@pytest.mark.parametrize("command", ["stats --once", "generate x", "--version", "models"])
def test_a_client_whose_output_is_closed_says_so_and_asks_nothing(service: Service, command: str) -> None:
    done = in_shell(f"RUNAHEAD {command} --url 127.0.0.1:{service.port} >&-")
    assert (done.returncode, done.stderr) == (1, "runahead: standard output can't be written: it is closed\n")


def test_a_closed_input_is_an_empty_one(service: Service) -> None:
    done = in_shell(f"RUNAHEAD stats --once --url 127.0.0.1:{service.port} <&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_figures_that_do_not_change_end_when_nobody_reads_them(service: Service) -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [*RUNAHEAD, "stats", "--url", f"127.0.0.1:{service.port}"], stdout=writer, stderr=subprocess.PIPE, text=True
    ) as shown:
        os.close(writer)
        assert os.read(reader, 10)
        os.close(reader)
        _, errors = shown.communicate(timeout=TIMEOUT_S)
    assert (shown.returncode, errors) == (1, "")


@pytest.mark.parametrize("flag", ["--out", "--picture"])
def test_a_file_with_no_room_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    trace_command.add_flags(parser)
    arguments = argparse.Namespace(**vars(parser.parse_args([flag, "/dev/full"])), url="127.0.0.1:1")
    assert trace_command._show(MADE_UP, arguments) == 1
    assert capsys.readouterr().err == "runahead trace: /dev/full can't be written: No space left on device\n"


# ------------------------------------------------------------ input without an end


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar", "--token-file", "--ca"])
def test_a_file_without_an_end_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x", flag, "/dev/zero"]) == 2
    assert "it has more than 16 MiB" in capsys.readouterr().err


def test_settings_without_an_end_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--config", "/dev/zero"]) == 2
    assert "config file /dev/zero can't be read: it has more than 1 MiB" in capsys.readouterr().err


def test_a_prompt_without_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(request_flags, "MOST_CHARACTERS", 1 << 20)
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert cli.main(["generate"]) == 2
    assert "the prompt on standard input has more than 1048576 characters" in capsys.readouterr().err


def test_a_line_of_a_chat_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_command, "MOST_CHARACTERS", 1 << 20)
    with Path("/dev/zero").open() as endless, contextlib.closing(chat_command.piped_lines()) as lines:
        monkeypatch.setattr(sys, "stdin", endless)
        with pytest.raises(UsageError, match="a line on standard input has more than 1048576 characters"):
            next(iter(lines))


# ------------------------------------------------------------ Ctrl-C


def interrupted_at(module: str, *arguments: str) -> tuple[int, str]:
    """What a command says, and its exit status, that is interrupted with all its processes when one has loaded a
    module."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # which has each process say what it loads
    with subprocess.Popen(
        [*RUNAHEAD, *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("import time:") and line.rstrip().endswith(f" {module}"):
                os.killpg(process.pid, signal.SIGINT)
                break
        said += process.stderr
        timer.cancel()
    return process.returncode, "".join(line for line in said if not line.startswith("import time:"))


@pytest.mark.parametrize("module", ["argparse", "msgspec", "grpc._cython.cygrpc", "google.protobuf.descriptor"])
def test_an_interrupt_while_a_client_loads_ends_it_without_a_word(module: str) -> None:
    assert interrupted_at(module, "generate", "x", "--url", "127.0.0.1:1") == (130, "")


@pytest.mark.parametrize("module", ["asyncio", "runahead.service.processes.supervisor", "tokenizers", "torch._utils"])
def test_an_interrupt_while_a_service_starts_is_no_traceback(module: str) -> None:
    code, said = interrupted_at(module, "serve", "--port", "0", "--health-port", "0")
    assert code in (0, 130), said
    assert "Traceback" not in said and "KeyboardInterrupt" not in said, said
