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


def rows_through_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rows of values, float32 [R, in], rounded to bfloat16 and to FP8 as products with FP8 matrices read them: 128
    columns share the least power of two that keeps them within 448."""
    made = []
    for block in x.bfloat16().float().split(128, 1):
        least = block.abs().amax(1, keepdim=True) / 448.0
        scale = torch.exp2(torch.log2(least.clamp(min=2.0**-60)).ceil())
        made.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(made, 1)
