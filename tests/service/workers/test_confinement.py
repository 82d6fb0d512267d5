"""A process that has given up files, sockets and other processes has none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest

PROBE: Final = """
import ctypes, json, os, platform, socket, sys
from runahead.service.workers.worker_side import confine

library = ctypes.CDLL(None, use_errno=True)
tgkill = {"x86_64": 234, "aarch64": 131}[platform.machine()]


def thread_signal(process):
    if library.syscall(tgkill, process, process, 0):
        raise OSError(ctypes.get_errno())


warning = confine(1 << 29)
tried = {}
for name, attempt in {
    "a file": lambda: open("/etc/hostname"),
    "a folder": lambda: os.listdir("/"),
    "a link": lambda: os.readlink("/proc/self/exe"),
    "a socket": lambda: socket.socket(),
    "a process": lambda: os.fork(),
    "a program": lambda: os.execv("/bin/true", ["true"]),
    "a signal": lambda: os.kill(os.getppid(), 0),
    "a signal to a thread": lambda: thread_signal(os.getppid()),
    "a descriptor": lambda: os.dup(0),
}.items():
    try:
        attempt()
        tried[name] = "done"
    except OSError as error:
        tried[name] = "refused"
try:
    bytearray(1 << 30)
    tried["memory"] = "done"
except MemoryError:
    tried["memory"] = "refused"
print(json.dumps([warning, tried]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the filter of system calls is Linux's")
def test_a_confined_process_reads_no_file_opens_no_socket_and_starts_no_process() -> None:
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    warning, tried = json.loads(done.stdout)
    if warning:
        pytest.skip(warning)
    assert tried and not {name for name, outcome in tried.items() if outcome != "refused"}
