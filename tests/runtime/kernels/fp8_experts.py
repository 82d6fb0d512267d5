"""A layer's experts with random FP8 matrices, and the same dequantized."""

from __future__ import annotations

from dataclasses import replace

import torch

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Experts, Linear, Norm, SharedExpert
from runahead.runtime.kernels.quantized_weight import ExpertFp8, QuantizedWeight
from runahead.runtime.rounding import ceil_div


def fp8_linears(
    count: int, outputs: int, depth: int, scale_rows: int, group: int, device: torch.device
) -> tuple[Linear, ...]:
    """Matrices in which every bit pattern but NaN comes up. Scales are no powers of two, of 24 bits."""
    draw = torch.Generator(device).manual_seed(outputs + depth)
    numbers = torch.randint(0, 256, (count * outputs, depth), generator=draw, device=device, dtype=torch.uint8)
    numbers[numbers & 127 == 127] = 126
    drawn = torch.rand((ceil_div(depth, group), count * outputs // scale_rows), generator=draw, device=device)
    scales = ((drawn + 0.5) * depth**-0.5 / 200.0).repeat_interleave(scale_rows, 1)
    whole = QuantizedWeight("fp8", numbers, scales, None, group, torch.bfloat16, scale_rows=scale_rows)
    assert torch.equal(
        whole.dequantized().view(count, outputs, depth),
        torch.stack([one.dequantized() for one in whole.experts(count)]),
    )
    return tuple(
        Linear(torch.empty(one.shape, dtype=one.dtype, device="meta"), None, one) for one in whole.experts(count)
    )


def fp8_experts(
    hidden: int,
    width: int,
    form: tuple[int, int],
    device: torch.device,
    *,
    count: int = 5,
    chosen: int = 2,
    shared: SharedExpert | None = None,
) -> Experts:
    """Draw a layer. form: rows and columns with one scale; 0: one row, and all columns."""
    scale_rows, group = form

    def linears(outputs: int, depth: int) -> tuple[Linear, ...]:
        return fp8_linears(count, outputs, depth, scale_rows or 1, group or depth, device)

    router = Linear(torch.zeros(count, hidden, dtype=torch.bfloat16, device=device), None)
    norm = Norm(torch.linspace(0.5, 1.5, hidden).to(device, torch.bfloat16), 1e-6)
    choice = Choice(chosen, renormalised=True)
    return Experts(norm, router, linears(2 * width, hidden), linears(hidden, width), choice, shared)


def dequantized(weights: Experts) -> Experts:
    """The same layer with its matrices in 16 bits."""

    def plain(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
        quantized = [linear.quantized for linear in linears if isinstance(linear.quantized, ExpertFp8)]
        assert len(quantized) == len(linears)
        whole = torch.stack([one.dequantized() for one in quantized])
        return tuple(Linear(weight, None) for weight in whole)

    return replace(weights, gate_up=plain(weights.gate_up), down=plain(weights.down))
