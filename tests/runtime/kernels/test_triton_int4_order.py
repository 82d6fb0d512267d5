"""What Triton makes of products with INT4 matrices, which the interpreter can't show."""

from __future__ import annotations

import os
import subprocess
import sys


def test_columns_are_added_in_ascending_order_and_no_weight_moves_between_threads() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, "-m", "tests.runtime.kernels.compiled_int4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == [
        "80 16 128 0 2", "80 16 32 0 2", "90 16 128 0 2", "90 16 32 0 2", "90 64 128 0 2", "90 64 32 0 2",
    ]  # fmt: skip
