"""Choose one of the vendor library's kernels for a product, while the service warms up and may wait for the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from runahead.runtime.kernels.layers import Linear
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, Fp8Weight
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gemm.separate_epilogue import fp8_rows

_ROUNDS: Final = 5  # in which each of them is timed
_MOST_TIMED: Final = 512  # rows; of more, no proposal was clearly faster than the first one
# How much longer the library's first proposal may take: of few rows, and of so many that the GPU's power limits a busy
# launch, where a kernel's rank in a short test says less.
_CLEARLY: Final = 1.03
_CLEARLY_OF_MANY: Final = 1.1
_MANY: Final = 256  # rows
_COLD_BYTES: Final = 80 << 20  # more than any L2 cache holds: weights of a timed product come from memory

# Given x, the weights and where the product goes.
Chain = Callable[[torch.Tensor | Fp8Rows, Linear, torch.Tensor], None]
Run = Callable[[int, torch.Tensor | Fp8Rows, Linear, torch.Tensor], None]  # given a kernel, too


def choose_kernel(
    run: Run, candidates: Sequence[int], linear: Linear, out: torch.Tensor, chain: Chain | None
) -> tuple[int, tuple[int, ...]]:
    """Return the fastest kernel and all kernels with the bits of the chain.

    The first candidate is chosen unless another is clearly faster; where there is a chain, only kernels with its bits
    are. out: as in the launch that warms up; it is overwritten. The candidates take turns and nothing waits between
    them, so that all are timed at the clocks of a busy GPU; x is random, since products of equal numbers draw less
    power.
    """
    exact = () if chain is None else _exact(run, candidates, linear, out, chain)
    choices = candidates if chain is None else exact
    if len(choices) < 2 or out.shape[0] > _MOST_TIMED:
        return next(iter(choices), candidates[0]), exact
    weight = linear.quantized.numbers if isinstance(linear.quantized, Fp8Weight) else linear.weight
    copies = [weight.clone() for _ in range(_COLD_BYTES // (weight.numel() * weight.element_size()))]
    linears = [linear, *(_with(linear, copy) for copy in copies)]
    x = _rows(linear, _drawn(out, weight.shape[1], 0))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(choices) + 1)] for _ in range(_ROUNDS + 1)]
    for around in events:
        around[0].record()
        for choice, behind in zip(choices, around[1:], strict=True):
            for copy in linears:
                run(choice, x, copy, out)
            behind.record()
    events[-1][-1].synchronize()
    times = [
        statistics.median(float(around[i].elapsed_time(around[i + 1])) for around in events[1:])
        for i in range(len(choices))
    ]
    clearly = _CLEARLY if out.shape[0] <= _MANY else _CLEARLY_OF_MANY
    best = min(times)
    return choices[0 if times[0] <= clearly * best else times.index(best)], exact


def _exact(run: Run, candidates: Sequence[int], linear: Linear, out: torch.Tensor, chain: Chain) -> tuple[int, ...]:
    """The kernels that have the bits of the chain, on sums that nearly cancel, so that they show their order."""
    depth = linear.weight.shape[1]
    half = _drawn(out, depth // 2, 1)
    x = _rows(linear, torch.cat((half, half.flip(1).neg_()), 1))
    near = _mirrored(linear)
    expected = torch.empty_like(out)
    chain(x, near, expected)
    found = []
    for choice in candidates:
        run(choice, x, near, out)
        found += [choice] if torch.equal(out, expected) else []
    return (*found,)


def _drawn(out: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Random rows for a product whose result is like `out`."""
    draw = torch.Generator(out.device).manual_seed(seed)
    return torch.randn((out.shape[0], width), generator=draw, device=out.device)


def _rows(linear: Linear, x: torch.Tensor) -> torch.Tensor | Fp8Rows:
    """x, float32 [T, in], as the product reads it."""
    return x.to(linear.weight.dtype) if linear.quantized is None else fp8_rows(x.bfloat16(), len(x))


def _with(linear: Linear, weight: torch.Tensor) -> Linear:
    """The product with other numbers of its weights."""
    if not isinstance(linear.quantized, Fp8Weight):
        return replace(linear, weight=weight)
    return replace(linear, quantized=replace(linear.quantized, numbers=weight))


def _mirrored(linear: Linear) -> Linear:
    """The second half of its columns is the first one the other way round; so are the scales of FP8, as far as 128
    columns lie in one half."""
    depth = linear.weight.shape[1]
    weight = linear.quantized
    if not isinstance(weight, Fp8Weight):
        return replace(linear, weight=_folded(linear.weight, depth // 2))
    return replace(linear, quantized=_of_folded(weight, depth // 2))


def _of_folded(weight: Fp8Weight, half: int) -> Fp8Weight:
    along, whole = half // FP8_COLUMNS, weight.shape[1] // FP8_COLUMNS
    blocks, by_output = weight.blocks.clone(), weight.by_output.clone()
    blocks[:, whole - along : whole] = blocks[:, :along].flip(1)
    by_output[whole - along :] = by_output[:along].flip(0)
    numbers = _folded(weight.numbers.view(torch.uint8), half).view(weight.numbers.dtype)
    return replace(weight, numbers=numbers, blocks=blocks, by_output=by_output)


def _folded(matrix: torch.Tensor, half: int) -> torch.Tensor:
    return torch.cat((matrix[:, :half], matrix[:, :half].flip(1)), 1)
