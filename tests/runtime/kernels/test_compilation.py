"""Kernels are compiled ahead of their launch, and ranks divide the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.runtime.kernels.compiled_ahead import SIZES, CompiledAhead


def test_kernels_are_compiled_once_without_a_launch_and_ranks_begin_with_different_ones(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "tests.runtime.kernels.compiled_ahead"]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ahead = msgspec.json.decode(done.stdout, type=CompiledAhead)
    assert ahead.compiled == [*SIZES[2:], *SIZES[:2]]
    assert ahead.found == list(SIZES), "the other rank has compiled them"
    assert not any(ahead.launched) and ahead.has
    assert ahead.launchers == 2 * len(SIZES)
    assert "too wide" in ahead.error
    assert ahead.parsing == 1, "Python's parser fails in threads before 3.11.8"
