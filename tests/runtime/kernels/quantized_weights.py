"""Random FP8 matrices of which kernels of a GPU take the form that they read."""

from __future__ import annotations

from typing import Final

import torch

from runahead.runtime.kernels.quantized_weight import QuantizedWeight

GROUPS: Final = (0, 128)  # columns that share a scale; 0: all, and each row has its own


def quantized(group: int, outputs: int, depth: int, device: torch.device) -> QuantizedWeight:
    """A scale for each row, or for 128 rows and `group` columns. Every bit pattern but NaN comes up. The second half of
    the columns is the first one the other way round, so that sums may cancel."""
    group = group or depth
    draw = torch.Generator(device).manual_seed(outputs + depth)
    numbers = torch.randint(0, 256, (outputs, depth), generator=draw, device=device, dtype=torch.uint8)
    numbers[numbers & 127 == 127] = 126
    numbers[:, depth // 2 :] = numbers[:, : depth // 2].flip(1)
    groups = -(-depth // group)
    scales = (torch.rand((groups, outputs), generator=draw, device=device) + 0.5) * depth**-0.5 / 300.0
    if group < depth:
        scales = scales[:, ::128].repeat_interleave(128, 1)[:, :outputs].contiguous()
    if groups > 1:
        scales[groups // 2 :] = scales[: groups // 2].flip(0)
    return QuantizedWeight("fp8", numbers, scales.bfloat16(), None, group, torch.bfloat16)
