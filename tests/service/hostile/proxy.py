"""HAProxy with the configuration of deploy/haproxy, in front of a service."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.service.fake_engine import TIMEOUT_S

CONFIGURATION: Final = Path(__file__).resolve().parents[3] / "deploy" / "haproxy" / "haproxy.cfg"
HAPROXY: Final = shutil.which(
    "haproxy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
)


@contextmanager
def proxied(server_port: int, **limits: int) -> Iterator[int]:
    """The port of a proxy in front of a service on this machine. limits: variables of its configuration."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "RUNAHEAD_LISTEN": f"127.0.0.1:{port}",
        "RUNAHEAD_SERVER": f"127.0.0.1:{server_port}",
        **{f"RUNAHEAD_{name.upper()}": str(value) for name, value in limits.items()},
    }
    assert HAPROXY is not None
    command = [HAPROXY, "-db", "-q", "-f", str(CONFIGURATION)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_until_it_listens(process, port)
            yield port
        finally:
            process.terminate()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "it has ended, and has said why"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("the proxy does not listen")
