"""A sum over ranks that starts while the kernel before it runs: it touches no memory before it waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_a_sum_over_ranks_lets_the_next_kernel_start_and_waits_before_it_reads_or_writes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "tests.runtime.ranks.compiled_sums"]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    touched = re.search(r"\b(ld|st|atom|red)\.(?!param|shared)[\w.]*global", done.stdout)
    starts, waits = (done.stdout.index(f"griddepcontrol.{word}") for word in ("launch_dependents", "wait"))
    assert touched and starts < waits < touched.start()
