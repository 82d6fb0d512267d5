"""Triton's interpreter computes the same when it is made quick."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.project.repository import ROOT
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="nothing is interpreted here")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_kernel_with_a_little_of_everything_leaves_the_same_bits() -> None:
    from triton.runtime import interpreter

    from tests.runtime.kernels.interpreted import digest
    from tests.runtime.kernels.quick_interpreter import MARK

    assert hasattr(interpreter, MARK), "as if tests ran in the interpreter as it is"
    command = [sys.executable, "-m", "tests.runtime.kernels.interpreted"]
    as_it_is = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert as_it_is.returncode == 0, as_it_is.stderr[-4000:]
    assert as_it_is.stdout.strip() == digest()


def test_every_bfloat16_is_the_float32_that_torch_makes_of_it() -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    patterns = np.arange(1 << 16, dtype=np.uint16)
    found = interpreter._convert_float(patterns, tl.bfloat16, tl.float32, None)
    assert np.array_equal(found, torch.from_numpy(patterns).view(torch.bfloat16).float().view(torch.uint32).numpy())


def test_a_float32_is_cut_to_bfloat16_as_it_was() -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    bits = np.random.default_rng(1).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    normal = bits[((bits >> 23) & 0xFF) > 0].view(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-37, -3.4e38], np.float32)
    numbers = np.concatenate([normal, edges]).reshape(1, -1)
    found = interpreter._convert_float(numbers, tl.float32, tl.bfloat16, None)
    assert np.array_equal(found, interpreter._convert_float.__wrapped__(numbers, tl.float32, tl.bfloat16, None))
    assert found.shape == numbers.shape
