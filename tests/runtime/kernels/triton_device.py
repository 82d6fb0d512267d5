"""Where Triton kernels are tested: on a CUDA GPU, or where there is none on the CPU, by Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from runahead.runtime.kernels.row_state import PenaltyState, RowState

State = TypeVar("State", RowState, PenaltyState)


def triton_device() -> torch.device:
    """The device on which kernels run in this process. Called before a module of `runahead.runtime.kernels.triton` is
    imported.

    tests/conftest.py asks for the interpreter where the machine has no GPU. Fails, and skips nothing, where triton is
    missing or nothing can run its kernels.
    """
    try:
        import triton
    except ImportError as error:
        pytest.fail(f"the tests of the kernels need triton, which `make setup` installs: {error}", pytrace=False)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.runtime.kernels.checked_addresses import check_addresses
        from tests.runtime.kernels.quick_interpreter import make_interpreter_quick

        make_interpreter_quick()
        check_addresses()
        _multiply_bfloat16()
        _round_once()
        _convert_fp8()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.fail(
            f"this machine has a CUDA driver, but torch {torch.__version__} finds no GPU to run the kernels of triton "
            f"{triton.__version__} on; TRITON_INTERPRET=1 runs them on the CPU",
            pytrace=False,
        )
    return torch.device("cuda")


def _multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as 16 bits of an integer, and multiplies those. Here they are the upper half of a
    float32 first, as which every product of two is exact."""
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot
    if hasattr(original, "widens"):
        return

    def widened(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widened(a), widened(b), *rest)

    create_dot.widens = True  # type: ignore[attr-defined]
    interpreter.InterpreterBuilder.create_dot = create_dot


def _round_once() -> None:
    """The interpreter multiplies and adds where a GPU rounds the sum of a float32 and an exact product. Here they are
    float64 first, as which the product is exact, and the sum rounded so much later that it is the same float32."""
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_fma
    if hasattr(original, "widens"):
        return

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.float32:
            return original(self, x, y, z)
        total = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(total.astype(np.float32), tl.float32)

    create_fma.widens = True  # type: ignore[attr-defined]
    interpreter.InterpreterBuilder.create_fma = create_fma


def _convert_fp8() -> None:
    """The interpreter rounds ties up and knows no NaN of FP8 e4m3. Here it converts as a GPU does: to nearest even, and
    what is too large becomes the largest number."""
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if hasattr(original, "knows_nan"):
        return
    largest = torch.finfo(torch.float8_e4m3fn).max
    floats = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}

    def convert(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (given.name, wanted.name):
            return original(data, given, wanted, rounding)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        stored = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}").reshape(-1))
        number = stored.view(bits[data.itemsize]).view(floats[given.name]).float()
        if wanted.name == "fp8e4nv":
            number = number.clamp(-largest, largest)
        found = number.to(floats[wanted.name])
        return found.view(bits[found.element_size()]).numpy().view(f"u{found.element_size()}").reshape(data.shape)

    convert.knows_nan = True  # type: ignore[attr-defined]
    convert.__wrapped__ = getattr(original, "__wrapped__", original)  # type: ignore[attr-defined]
    interpreter._convert_float = convert


def on(device: torch.device, state: State) -> State:
    """The same row state, or counts, on this device."""
    names = state._fields if isinstance(state, PenaltyState) else [field.name for field in fields(state)]
    return type(state)(**{name: getattr(state, name).to(device) for name in names})


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """float32, and bfloat16 on a GPU: what the interpreter would do twice."""
    return (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected; NaN wherever there is one."""
    expected = expected.double().cpu()
    return float((found.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-30))


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 8e-3}


@contextlib.contextmanager
def synchronising_calls_raise() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
