"""The kernels' tests run on every machine, and one on which they can't does not pass them over in silence."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.kernels.triton_device import triton_device

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/runtime/kernels/test_triton_pointwise.py"]))
"""
WITHOUT_A_GPU = """
import torch
torch.cuda.is_available = lambda: False
from tests.runtime.kernels.triton_device import triton_device
triton_device()
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_without_triton_the_tests_of_the_kernels_fail_and_say_what_to_do() -> None:
    done = run(WITHOUT_TRITON)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "make setup" in done.stdout
    assert "skipped" not in done.stdout


def test_with_a_driver_but_no_gpu_they_fail_and_name_the_interpreter() -> None:
    done = run(WITHOUT_A_GPU, TRITON_INTERPRET="0")
    assert done.returncode != 0
    assert "TRITON_INTERPRET=1" in done.stderr


def test_the_interpreter_runs_them_where_there_is_no_gpu() -> None:
    import torch

    assert (triton_device().type == "cuda") is (torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1")


def test_no_test_is_passed_over_because_a_package_is_missing() -> None:
    passed_over = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if "importorskip" in {getattr(node, "attr", "") for node in ast.walk(ast.parse(path.read_text("utf-8")))}
    ]
    assert not passed_over, "what a test needs is in the extra that installs it"
