"""Memory that processes share has its room when it is made, or the service does not start."""

from __future__ import annotations

import os
import subprocess
import sys

from runahead.service.processes.supervisor import _shared_memory
from runahead.service.shared_memory.board import Board

END_S = 60.0
REFUSED = """
import random, resource, tempfile
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.processes.supervisor import _shared_memory
tempfile.gettempdir()
limit = resource.RLIMIT_{limit}
resource.setrlimit(limit, ({most}, resource.getrlimit(limit)[1]))
try:
    _shared_memory(100_000)
except ConfigError as error:
    print(error)
"""


def test_a_store_to_it_needs_no_room_on_the_disk_any_more() -> None:
    size = Board.size(3)
    with _shared_memory(size) as memory:
        about = os.fstat(memory.fileno())
        assert about.st_size == size
        assert about.st_blocks * 512 >= size


def test_where_it_has_no_room_the_refusal_names_the_folder() -> None:
    script = REFUSED.format(limit="FSIZE", most=50_000)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=END_S, check=True)
    assert "the folder for temporary files, can't hold the 100000 bytes" in done.stdout
    assert "File too large; TMPDIR names another one" in done.stdout


def test_where_there_is_no_descriptor_for_it_the_refusal_says_so() -> None:
    script = REFUSED.format(limit="NOFILE", most=3)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=END_S, check=True)
    assert "Too many open files" in done.stdout
