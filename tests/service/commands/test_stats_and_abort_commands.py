"""`runahead stats` and `runahead abort`, against a front end over a fake engine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runahead.service import cli
from runahead.service.calls.admission import Access
from runahead.service.commands import stats_command
from runahead.service.commands.stats_command import stats_lines
from runahead.service.credentials.callers import CallersFile
from runahead.service.servers.supervised import Security
from runahead.service.settings.settings import FrontEndSettings
from runahead.v1 import GenerateRequest, StatsRequest, stats_pb2
from tests.service.fake_engine import STATS, TIMEOUT_S, FakeEngine
from tests.service.running_service import Service

OPS = "the-operators-token-0123"
ROWS, COLUMNS = 40, 90
TO_THE_OTHER_SCREEN, BACK = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """One that writes no log to the output that is looked at."""
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, settings=FrontEndSettings(request_log=False)) as running:
        yield running


def url(service: Service) -> str:
    return f"127.0.0.1:{service.port}"


def command(service: Service, name: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "runahead", name, "--url", url(service), *flags]


# ---------------------------------------------------------------- stats


def test_figures_are_printed_once(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--url", url(service), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split(None, 1)[0]: line.split(None, 1)[-1] for line in lines}
    assert found["requests"].startswith("waiting 1, running 2, submitted 6, admitted 5")
    assert found["refusals"] == "none"
    assert "restarts 1" in found["masks"] and "written_s 0.500" in found["masks"]
    assert found["snapshots"] == "total 4, free 1, owned 1, fenced 0, cached 2, kept 5, found 3, skipped 7"
    assert "drafted (1: 20; 2: 15), accepted (1: 12; 2: 4), per_launch 1.250" in found["tokens"]
    assert not [name for name in found if name.endswith("_histogram")]
    assert not [line for line in lines if line.startswith("pace")], "there is nothing to compare with"


def test_every_group_of_the_contract_but_histograms_is_a_line() -> None:
    """A figure that is added to the contract is shown without another change."""
    fields = {field.name for field in stats_pb2.ServerStats.DESCRIPTOR.fields}
    shown = {line.split(None, 1)[0] for line in stats_lines(stats_pb2.ServerStats())}
    assert shown == {name for name in fields if not name.endswith("_histogram")}


def test_json_has_every_field_by_the_contract_s_name(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--url", url(service), "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert figures["requests"]["submitted"] == "6", "64 bits are text, as protobuf has it"
    assert figures["front_end"]["open_streams"] == "0", "a zero is said"
    assert figures["chain"]["overlap_ratio"] == STATS.overlap_ratio


def test_without_a_terminal_changes_come_as_blocks_and_no_control_sequences(service: Service) -> None:
    with subprocess.Popen(command(service, "stats", "--interval", "0.05"), stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        while "waiting 1" not in shown.stdout.readline():
            pass
        changed = {"waiting": 9, "uptime_s": STATS.uptime_s + 2.0, "generated_tokens": STATS.generated_tokens + 500}
        service.engine.stats = msgspec.structs.replace(STATS, **changed)
        block: list[str] = []
        while not block or not block[-1].startswith("pace"):
            block.append(shown.stdout.readline())
        shown.send_signal(signal.SIGINT)
        assert shown.wait(TIMEOUT_S) == 0, "whoever has seen enough did nothing wrong"
    text = "".join(block)
    assert "\n\nuptime_s  " in text and "waiting 9, running 2, submitted 6" in text and "\x1b" not in text
    assert "pace           over 2.0 s: 250 tokens/s generated" in text


def test_json_goes_on_line_by_line_until_a_time_is_over(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--url", url(service), "--json", "--timeout", "3"]) == 0
    shown = capsys.readouterr()
    assert [json.loads(line)["requests"]["waiting"] for line in shown.out.splitlines()] == ["1"]
    assert shown.err == ""


@contextlib.contextmanager
def on_a_terminal(arguments: list[str]) -> Any:
    """The process, and what reads from its terminal until something has come, all of it so far."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    read = bytearray()

    def until(text: str) -> str:
        while text not in read.decode("utf-8", "replace"):
            read.extend(os.read(reader, 1 << 16))
        return read.decode("utf-8", "replace")

    process = subprocess.Popen(arguments, stdin=writer, stdout=writer, stderr=writer, env=environment)
    os.close(writer)
    try:
        yield process, until
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def test_on_a_terminal_figures_stand_in_place_and_the_screen_is_given_back(service: Service) -> None:
    with on_a_terminal(command(service, "stats", "--interval", "0.05")) as (process, until):
        first = until("\x1b[J")
        assert first.startswith(TO_THE_OTHER_SCREEN)
        assert f"{url(service)}, whenever a figure changes" in first
        lines = re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", first).split("\r\n")
        assert len(lines) <= ROWS and max(map(len, lines)) <= COLUMNS, "longer lines are wrapped"
        service.engine.stats = msgspec.structs.replace(STATS, waiting=9)
        assert until("waiting 9").count(TO_THE_OTHER_SCREEN) == 1
        process.send_signal(signal.SIGINT)
        assert until(BACK)
        assert process.wait(TIMEOUT_S) == 0


def test_a_server_that_ends_gives_the_screen_back_before_it_is_said(service: Service) -> None:
    with on_a_terminal(command(service, "stats")) as (process, until):
        until("\x1b[J")
        service.stop(grace_s=0.0)
        shown = until("runahead stats: UNAVAILABLE: the server is shutting down")
        assert shown.index(BACK) < shown.index("runahead stats:")
        assert process.wait(TIMEOUT_S) == 1


def test_a_reader_that_goes_ends_it_without_a_traceback(service: Service) -> None:
    process = subprocess.Popen(
        command(service, "stats", "--interval", "0.05"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        waiting = 100
        while process.poll() is None:
            waiting += 1
            service.engine.stats = msgspec.structs.replace(STATS, waiting=waiting)
        assert (process.returncode, process.stderr.read()) == (1, "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--interval", "soon"], "--interval must be a number of seconds above 0"),
        (["--timeout", "-1"], "--timeout must be a number of seconds above 0"),
        (["--cert", "c.pem"], "--cert and --key go together"),
    ],
)
def test_a_flag_that_is_wrong_is_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"runahead stats: {said}")


def test_an_interval_that_the_server_refuses_is_said(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--url", url(service), "--interval", "0.01"]) == 1
    assert "INVALID_ARGUMENT: interval must be 0.05 to 3600 seconds" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_ends_one_look_in_time(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.engine.answers_stats = False
    monkeypatch.setattr(stats_command, "ONCE_S", 0.2)
    assert cli.main(["stats", "--url", url(service), "--once"]) == 1
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err


@pytest.mark.parametrize("name", [["stats", "--once"], ["abort", "x"]])
def test_where_nobody_listens_it_says_so(name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name, "--url", "127.0.0.1:1"]) == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err


@contextlib.contextmanager
def http_server() -> Iterator[int]:
    """The port of one that speaks HTTP/1, as the metrics' does."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_where_somebody_listens_who_speaks_otherwise_it_says_why(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stats", "--once", "--tls", "--url", url(service)]) == 1
    said = capsys.readouterr().err
    assert "no server answers" not in said
    assert f"no connection to a server at {url(service)}: " in said and "handshake failed" in said
    assert "where it has none, neither may be given" in said


def test_where_a_server_of_another_protocol_listens_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as port:
        assert cli.main(["stats", "--once", "--url", f"127.0.0.1:{port}"]) == 1
    said = capsys.readouterr().err
    assert "no server answers" not in said and "HTTP/2" in said and "--tls" in said


# ---------------------------------------------------------------- abort


def opened(service: Service, request_id: str) -> Any:
    call = service.stub.Generate(GenerateRequest(text="once", request_id=request_id), timeout=60)
    assert next(call).HasField("accepted")
    return call


def test_each_id_is_said_with_what_became_of_it(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [opened(service, "r1"), opened(service, "r2")]
    assert cli.main(["abort", "--url", url(service), "r1"]) == 0
    assert capsys.readouterr().out == "r1 ABORTED\n"
    assert cli.main(["abort", "r2", "nobody", "--url", url(service)]) == 1, "one is not known"
    assert capsys.readouterr().out == "r2 ABORTED\nnobody NOT_FOUND\n"
    assert all(list(call)[-1].HasField("finished") for call in calls)


def test_all_are_ended_and_named(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [opened(service, "r1"), opened(service, "r2")]
    assert cli.main(["abort", "--all", "--url", url(service)]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["r1 ABORTED", "r2 ABORTED"]
    assert all(list(call)[-1].HasField("finished") for call in calls)
    assert cli.main(["abort", "--all", "--url", url(service)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "give the ids of requests, or --all"), (["x", "--all"], "give the ids of requests, or --all, and not both")],
)
def test_ids_or_all_are_wanted_and_not_both(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["abort", *given]) == 2
    assert capsys.readouterr().err == f"runahead abort: {said}\n"


def test_an_id_that_can_be_none_is_refused_by_name(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["abort", "a b", "--url", url(service)]) == 1
    assert "INVALID_ARGUMENT: request_ids" in capsys.readouterr().err
    assert cli.main(["abort", "\udcff", "--url", url(service)]) == 2
    assert "an id is not UTF-8" in capsys.readouterr().err


def test_both_show_a_token_to_a_server_that_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callers, token, path = tmp_path / "callers", tmp_path / "token", tmp_path / "engine.sock"
    callers.write_text(f"ops control token {OPS}\n")
    token.write_text(OPS + "\n")
    with Service(FakeEngine(path), path, security=Security(Access(CallersFile(callers)), None)) as service:
        for name in (["stats", "--once"], ["abort", "--all"]):
            assert cli.main([*name, "--url", url(service)]) == 1
            said = capsys.readouterr().err
            assert "UNAUTHENTICATED" in said
            assert "--token-file FILE sends the token" in said
            assert cli.main([*name, "--url", url(service), "--token-file", str(token)]) == 0
        metadata = [("authorization", f"Bearer {OPS}")]
        refusals = service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S, metadata=metadata).stats.refusals
        assert dict(refusals) == {"NO_CREDENTIALS": 2}
