"""What Triton makes of products with FP8 matrices, where the interpreter can't show the order of sums."""

from __future__ import annotations

import os
import subprocess
import sys


def test_weights_go_to_the_matrix_units_in_ascending_order_and_between_no_threads() -> None:
    """Triton gives a thread 4 columns in a row of an operand that comes from 8 bits, and a step of the matrix units
    every second pair of them, unless something hides where the operand comes from."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, "-m", "tests.runtime.kernels.compiled_fp8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 2
    assert {tuple(line[-2:]) for line in lines} == {("0", "2")}, done.stdout
