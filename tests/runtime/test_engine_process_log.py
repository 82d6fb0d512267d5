"""The engine's process does with the logging settings what they say."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime import messages as m
from runtime import models
from runtime.request import SamplingParams, StoppingParams

BUNDLED = Path(models.__path__[0]) / "bundled"
TOKENS, INTERVAL = 12, 4


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    config = {"model": str(BUNDLED), "num_blocks": 130, "threads": 1, "log_interval": INTERVAL, "log_mode": "barrier"}
    with subprocess.Popen(
        [sys.executable, "-m", "runtime.engine_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"socket": str(tmp_path / "engine"), "config": config}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def received(sock: socket.socket) -> Iterator[m.ToFrontEnd]:
    reader = m.FrameReader()
    while data := sock.recv(1 << 16):
        for body in reader.feed(data):
            yield m.decode_to_front_end(body)


def test_a_snapshot_is_logged_every_so_many_launches_behind_a_barrier(
    engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    submit = m.Submit(
        1, "r1", np.array([5, 6, 7], np.int32).tobytes(), SamplingParams(), StoppingParams(TOKENS, ignore_eos=True)
    )
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
