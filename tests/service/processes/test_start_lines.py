"""The log begins with what is started, before anything slow; a person at a terminal sees in the end what to call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_service import BESIDE
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes import start_lines
from runahead.service.settings.server_config import ServerConfig
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.version import full_version
from tests.service.commands.terminal import on_a_terminal

SERVES = "serves m on cuda; call it: runahead generate 'def fibonacci(n):'"
SERVE = ("-m", "runahead", "serve", "--port", "0", "--threads", "1", "--num-blocks", "200", *BESIDE)


def test_a_terminal_shows_what_is_loaded_first_and_what_to_call_last() -> None:
    with on_a_terminal(SERVE) as terminal:
        terminal.until("call it: runahead generate 'def fibonacci(n):' --url 127.0.0.1:")
        shown = terminal.shown
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ends() == 0
    first = shown.splitlines()[0]
    assert "starting" in first and "bundled" in first
    last = shown.splitlines()[-1]
    assert last.startswith("127.0.0.1:")
    assert " serves bundled on cpu; " in last
    assert "loading" in shown, "progress is shown between the two"


def test_a_start_that_is_refused_has_named_what_it_started(tmp_path: Path) -> None:
    command = [sys.executable, *SERVE, "--log-format", "json", "--device", "cpu", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    assert done.returncode == 2
    started = json.loads(done.stderr.splitlines()[0])
    assert (started["event"], started["model"], started["device"]) == ("starting", tmp_path.name, "cpu")
    assert started["version"] == full_version()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, f"127.0.0.1:7 {SERVES} --url 127.0.0.1:7"),
        (
            {"host": "0.0.0.0"},
            "0.0.0.0:7 serves m on cuda; call it: runahead generate 'def fibonacci(n):' --url 127.0.0.1:7",
        ),
        ({"host": "[::]"}, f"[::]:7 {SERVES} --url [::1]:7"),
        ({"tokenizer": "none"}, "runahead generate --token-ids 1,2,3 --url 127.0.0.1:7"),
        ({"tls_cert": "c", "tls_key": "k", "callers": "f"}, " --url 127.0.0.1:7 --ca FILE --token-file FILE"),
        ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, " --ca FILE --cert FILE --key FILE"),
    ],
)
def test_the_command_reaches_the_service_as_it_is_set_up(
    settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_lines, "draws_on_a_terminal", lambda output: True)
    config = ServerConfig(EngineConfig(model="x", served_name="m"), FrontEndSettings(**settings))
    start_lines.say_serving(config, 7, "cuda")
    assert capsys.readouterr().err.endswith(said + "\n")
