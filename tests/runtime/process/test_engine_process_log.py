"""The engine's process does with the logging settings what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runahead.runtime import models
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.frames import FrameReader
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.service.processes.children import ENGINE_COMMAND

BUNDLED = Path(models.__path__[0]) / "bundled"
TOKENS, INTERVAL = 12, 4
ASKED: dict[str, Any] = {  # none of them the default
    "run_ahead": 4,
    "run_ahead_tokens": 96,
    "prefill_chunk": 64,
    "max_prefill_tokens": 192,
    "max_rows": 8,
    "num_blocks": 130,
    "block_size": 32,
    "context_length": 1000,
    "penalty_slots": 5,
    "prefix_cache": False,
    "log_interval": INTERVAL,
    "log_mode": "barrier",
    "launch_timeout_s": 60.5,
    "threads": 1,
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    config = {"model": str(BUNDLED), "device": "cpu", **ASKED}
    with subprocess.Popen(
        ENGINE_COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(
            json.dumps({"socket": str(tmp_path / "engine"), "parent": os.getpid(), "config": config}) + "\n"
        )
        process.stdin.flush()
        assert process.stdout.readline() == "ready cpu\n"
        yield process
        process.kill()


def received(sock: socket.socket) -> Iterator[m.ToFrontEnd]:
    reader = FrameReader()
    while data := sock.recv(1 << 16):
        for body in reader.feed(data):
            yield m.decode_to_front_end(body)


def test_a_snapshot_is_logged_every_so_many_launches_behind_a_barrier(
    engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    submit = m.Submit(
        1, "r1", np.array([5, 6, 7], np.int32).tobytes(), SamplingParams(), StoppingParams(TOKENS, ignore_eos=True)
    )  # too short for a block of the prefix cache
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(tmp_path / "engine"))
        for message in (m.Hello(m.PROTOCOL_VERSION), submit):
            sock.sendall(m.encode_frame(message))
        messages = received(sock)
        next(message for message in messages if isinstance(message, m.Output) and message.finished)
        sock.sendall(m.encode_frame(m.StatsQuery(1)))
        stats = next(message for message in messages if isinstance(message, m.StatsReply)).stats
    assert stats.launches == TOKENS + 1
    assert stats.barriers == {"logging": stats.launches // INTERVAL}
    _, log = engine.communicate(timeout=60)  # the end of standard input ends it
    events = [json.loads(line) for line in log.splitlines()]
    logged = [event["launch"] for event in events if event["event"] == "snapshot"]
    assert logged == list(range(INTERVAL, stats.launches + 1, INTERVAL))


def test_the_start_logs_in_one_line_what_the_chain_runs_with(engine: subprocess.Popen[str]) -> None:
    _, log = engine.communicate(timeout=60)  # the end of standard input ends it
    (chain,) = [event for event in map(json.loads, log.splitlines()) if event["event"] == "chain"]
    asked = {name: value for name, value in ASKED.items() if name != "num_blocks"}
    assert {name: chain[name] for name in asked} == asked
    assert all(value != getattr(EngineConfig(model=""), name) for name, value in ASKED.items())
    assert chain["run_ahead_asked"] == ASKED["run_ahead"]
    assert chain["ring_slots"] == ASKED["run_ahead"] + 2
    assert chain["blocks"] == ASKED["num_blocks"] - 1, "one is the null block"
    assert (chain["device"], chain["dtype"], chain["graph_buckets"]) == ("cpu", "float32", [])


def test_why_a_front_end_was_refused_is_logged(engine: subprocess.Popen[str], tmp_path: Path) -> None:
    broken = m.Submit(1, "r1", b"12345", SamplingParams(), StoppingParams(TOKENS))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(tmp_path / "engine"))
        for message in (m.Hello(m.PROTOCOL_VERSION), broken):
            sock.sendall(m.encode_frame(message))
        assert [type(message) for message in received(sock)] == [m.Welcome], "the engine ends the connection"
    _, log = engine.communicate(timeout=60)  # the end of standard input ends it
    (refused,) = [event for event in map(json.loads, log.splitlines()) if event["event"] == "front_end_refused"]
    assert (refused["level"], refused["owner"]) == ("warning", 1)
    assert refused["why"] == "a Submit's prompt has 5 bytes, no whole number of int32"
