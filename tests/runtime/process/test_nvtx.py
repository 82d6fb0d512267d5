"""`nvtx`: a process of the engine that is told to names its stages for a profiler, and no other does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from runahead.runtime import models
from runahead.runtime.engine.ranges import STAGES
from runahead.runtime.process.main import _check_nvtx
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.process.test_engine_process_log import received

BUNDLED = Path(models.__path__[0]) / "bundled"

# A torch that is built for CUDA stands in, as far as ranges go.
PROCESS = """
import sys
import torch
torch.backends.cuda.is_built = lambda: True
torch.cuda.nvtx.range_push = lambda name: print("range", name, file=sys.stderr)
torch.cuda.nvtx.range_pop = lambda: None
from runahead.runtime.process.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("nvtx", [True, False])
def test_the_switch_alone_says_whether_there_are_ranges(nvtx: bool, tmp_path: Path) -> None:
    config = {"model": str(BUNDLED), "device": "cpu", "nvtx": nvtx, "threads": 1, "num_blocks": 130}
    submit = m.Submit(
        1, "r1", np.array([5, 6, 7], np.int32).tobytes(), SamplingParams(), StoppingParams(4, ignore_eos=True)
    )
    command = [sys.executable, "-c", PROCESS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(
            json.dumps({"socket": str(tmp_path / "engine"), "parent": os.getpid(), "config": config}) + "\n"
        )
        process.stdin.flush()
        assert process.stdout.readline() == "ready cpu\n"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(str(tmp_path / "engine"))
            for message in (m.Hello(m.PROTOCOL_VERSION), submit):
                sock.sendall(m.encode_frame(message))
            next(message for message in received(sock) if isinstance(message, m.Output) and message.finished)
        _, said = process.communicate(timeout=60)  # the end of standard input ends it
    assert process.returncode == 0, said
    ranges = {line.removeprefix("range ") for line in said.splitlines() if line.startswith("range ")}
    assert ranges == (set(STAGES) if nvtx else set())


def test_ranges_are_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match="nvtx needs a torch that is built for CUDA"):
        _check_nvtx(EngineConfig(model="", nvtx=True))
    _check_nvtx(EngineConfig(model=""))
