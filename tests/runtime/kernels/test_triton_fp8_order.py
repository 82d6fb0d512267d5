"""What Triton makes of products with FP8 matrices, which the interpreter can't show."""

from __future__ import annotations

import os
import subprocess
import sys


def test_fp8_goes_to_the_matrix_units_as_it_is_and_values_past_its_range_become_its_greatest_number() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, "-m", "tests.runtime.kernels.compiled_fp8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == [
        "89 16 mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
        "89 64 mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
        *(f"89 {kernel} cvt.rn.satfinite.e4m3x2.f16x2" for kernel in ("rows", "finish", "add")),
        "90 16 wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3",
        "90 64 wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
        *(f"90 {kernel} cvt.rn.satfinite.e4m3x2.f32" for kernel in ("rows", "finish", "add")),
        *(f"90 experts {n} wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3" for n in (16, 128)),
    ]
