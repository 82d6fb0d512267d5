"""Random INT4 matrices, as a checkpoint has them."""

from __future__ import annotations

import torch

from runahead.runtime.kernels.quantized_weight import QuantizedWeight, packed_pairs


def int4(
    outputs: int,
    depth: int,
    device: torch.device,
    group: int = 128,
    scales: torch.dtype = torch.bfloat16,
    *,
    zero_points: bool = False,
) -> QuantizedWeight:
    """The second half of the columns is the first one the other way round where the depth allows it, so that sums may
    cancel."""
    draw = torch.Generator(device).manual_seed(outputs + depth)
    numbers = torch.randint(0, 16, (outputs, depth), generator=draw, device=device, dtype=torch.uint8)
    numbers[:, depth // 2 :] = numbers[:, : depth // 2].flip(1)
    groups = -(-depth // group)
    drawn = (torch.rand((groups, outputs), generator=draw, device=device) + 0.5) * depth**-0.5 / 5.0
    points = None
    if zero_points:
        points = torch.randint(0, 16, (groups, outputs), generator=draw, device=device, dtype=torch.uint8)
    if groups > 1:
        drawn[groups // 2 :] = drawn[: groups // 2].flip(0) if groups % 2 == 0 else drawn[groups // 2 :]
        if points is not None and groups % 2 == 0:
            points[groups // 2 :] = points[: groups // 2].flip(0)
    return QuantizedWeight("int4", packed_pairs(numbers), drawn.to(scales), points, group, torch.bfloat16)
