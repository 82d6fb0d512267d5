"""A child does not outlive its parent, whatever state it is in."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

END_S = 60.0
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""
CHILD = """
import os
from runahead.runtime.process_end import signal_at_parents_death
signal_at_parents_death()
print("begun", flush=True)
while True:
    os.read(0, 1)  # whatever the end of its input says
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system has such a signal")


@pytest.mark.parametrize("state", ["stopped", "running"])
def test_a_child_ends_with_its_parent(state: str) -> None:
    command = [sys.executable, "-c", PARENT, sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        said = {parent.stdout.readline(), parent.stdout.readline()} - {"begun\n"}
        child = int(said.pop())
        ended = os.pidfd_open(child)
        try:
            if state == "stopped":
                os.kill(child, signal.SIGSTOP)
            parent.kill()
            assert select.select([ended], [], [], END_S)[0]
        finally:
            os.close(ended)
