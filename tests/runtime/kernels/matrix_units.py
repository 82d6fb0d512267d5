"""Products of Triton's interpreter as matrix units make them, so that the order of a kernel's sums shows in its bits,
and the order of NumPy's does not."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

AT_ONCE: Final = 16  # terms that a matrix unit adds up, of 16 bits each


def multiply_as_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 terms at a time are added to what there is, in float64 and rounded: so close to the true sum that NumPy's own
    order, which hangs on the shape of a tile, leaves no trace in float32."""
    from triton import language as tl
    from triton.runtime import interpreter

    def wide(handle: Any) -> NDArray[np.float64]:
        data: NDArray[Any] = handle.data
        if handle.dtype == tl.bfloat16:  # the interpreter keeps it as the upper half of a float32
            data = (data.astype(np.uint32) << 16).view(np.float32)
        if handle.dtype == tl.float8e4nv:
            data = torch.from_numpy(data.copy()).view(torch.float8_e4m3fn).float().numpy()
        return data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right, total = wide(a), wide(b), d.data
        for k in range(0, left.shape[-1], AT_ONCE):
            total = (total + left[..., k : k + AT_ONCE] @ right[..., k : k + AT_ONCE, :]).astype(d.data.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def round_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts a float32 off where a GPU rounds it to the nearest bfloat16, ties to even."""
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return original(numbers, source, target, rounding)
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16).reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
