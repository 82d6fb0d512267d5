"""Blocks of 32 numbers of GGUF files, taken apart: a float16 scale, then the numbers.

Source: `block_q4_0` in ggml-common.h of ggml.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.checkpoint.quantized.form import NumberForm

_BLOCK: Final = 32
# A CPU dequantizes them while they are loaded.
FORMS: Final = {"Q4_0": NumberForm(False, 4, (1, _BLOCK), "F16", stays_on_cpu=False)}


def parts_of(stored: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return Q4_0 numbers without signs, [rows, columns], and scales, [rows, columns / 32]. stored: [rows, bytes]."""
    rows = len(stored)
    blocks = np.ascontiguousarray(stored).view(np.uint8).reshape(rows, -1, 2 + _BLOCK // 2)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)
    numbers = blocks[:, :, 2:]  # byte j has number j in its low bits and number 16 + j in its high bits
    return np.concatenate((numbers & 15, numbers >> 4), 2).reshape(rows, -1), scales
