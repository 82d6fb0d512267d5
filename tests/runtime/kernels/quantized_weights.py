"""Random quantized matrices of every kind that kernels take."""

from __future__ import annotations

import torch

from runahead.runtime.kernels.quantized_weight import Kind, QuantizedWeight, packed_pairs

# Kind, columns that share a scale (0: all), and whether there are zero points.
FORMS: tuple[tuple[Kind, int, bool], ...] = (
    ("fp8", 0, False), ("fp8", 128, False), ("int8", 0, False), ("int8", 0, True), ("int8", 128, False),
    ("int4", 0, False), ("int4", 128, False), ("int4", 128, True), ("int4", 64, True), ("int4", 32, False),
)  # fmt: skip


def quantized(
    form: tuple[Kind, int, bool], outputs: int, depth: int, device: torch.device, scales: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Every bit pattern but FP8's NaN comes up. The second half of the columns is the first one the other way round, so
    that sums may cancel. scales: their dtype."""
    kind, group, has_zero_points = form
    group = group or depth
    draw = torch.Generator(device).manual_seed(outputs + depth)
    most = 16 if kind == "int4" else 256
    numbers = torch.randint(0, most, (outputs, depth), generator=draw, device=device, dtype=torch.uint8)
    if kind == "fp8":
        numbers[numbers & 127 == 127] = 126
    numbers[:, depth // 2 :] = numbers[:, : depth // 2].flip(1)
    groups = -(-depth // group)
    spread = {"fp8": 300.0, "int8": 128.0, "int4": 8.0}[kind]
    of_groups = ((torch.rand((groups, outputs), generator=draw, device=device) + 0.5) * depth**-0.5 / spread).to(scales)
    zeros = (
        torch.randint(0, most, (groups, outputs), generator=draw, device=device, dtype=torch.uint8)
        if has_zero_points
        else None
    )
    if groups > 1:
        for of_group in (of_groups, *([] if zeros is None else [zeros])):
            of_group[groups // 2 :] = of_group[: groups // 2].flip(0)
    return QuantizedWeight(
        kind,
        packed_pairs(numbers) if kind == "int4" else numbers,
        of_groups,
        zeros,
        group,
        torch.bfloat16,
    )
