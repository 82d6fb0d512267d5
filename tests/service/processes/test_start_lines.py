"""A person at a terminal sees at once that a model is loaded, and at the end one line with what to call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.local_service import BESIDE
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes import start_lines
from runahead.service.settings.server_config import ServerConfig
from runahead.service.settings.settings import FrontEndSettings
from tests.service.commands.terminal import on_a_terminal

SERVES = "serves m on cuda; call it: runahead generate 'def fibonacci(n):'"
SERVE = ("-m", "runahead", "serve", "--port", "0", "--threads", "1", "--num-blocks", "200", *BESIDE)


def test_a_terminal_shows_what_is_loaded_first_and_what_to_call_last() -> None:
    with on_a_terminal(SERVE) as terminal:
        terminal.until("call it: runahead generate 'def fibonacci(n):' --url 127.0.0.1:")
        shown = terminal.shown
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ends() == 0
    assert shown.startswith("loading bundled\r\n")
    last = shown.splitlines()[-1]
    assert last.startswith("127.0.0.1:")
    assert " serves bundled on cpu; " in last
    assert shown.index("loading [") < shown.index(last), "progress is shown between the two"


@pytest.mark.parametrize("quiet", [("--log-format", "json"), ("--log-level", "warning"), ()])
def test_logs_that_no_person_watches_have_no_such_line(quiet: tuple[str, ...]) -> None:
    command = [sys.executable, *SERVE, *quiet, "--context-length", "99999"]  # which the engine refuses
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    assert done.returncode == 2
    assert "loading bundled" not in done.stderr


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
