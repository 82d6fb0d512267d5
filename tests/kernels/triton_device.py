"""Where Triton kernels are tested: on a CUDA GPU, or on the CPU by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch


def triton_device() -> torch.device:
    """The device, or a skip that says what is missing."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels need it")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)
    return torch.device("cuda")


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """float32, and bfloat16 on a GPU: the interpreter's bfloat16 products are wrong."""
    return (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected; NaN wherever there is one."""
    expected = expected.double().cpu()
    return float((found.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-30))


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}
