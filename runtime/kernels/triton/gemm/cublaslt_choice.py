"""Which of the kernels that the vendor's library proposes for a product computes it: chosen while the service warms up,
where it may wait for the GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from runahead.runtime.kernels.layers import Linear

_ROUNDS: Final = 5  # in which each of them is timed
_MOST_TIMED: Final = 512  # rows; of more, no proposal was clearly faster than the first one
# How much longer the library's first proposal may take: of few rows, and of so many that the GPU's power limits a busy
# launch, where a kernel's rank in a short test says less.
_CLEARLY: Final = 1.03
_CLEARLY_OF_MANY: Final = 1.1
_MANY: Final = 256  # rows
_COLD_BYTES: Final = 80 << 20  # more than any L2 cache holds: weights of a timed product come from memory

# Given x, the weights and where the product goes.
Chain = Callable[[torch.Tensor, Linear, torch.Tensor], None]
Run = Callable[[int, torch.Tensor, Linear, torch.Tensor], None]  # given a kernel, too


def choose_kernel(
    run: Run, candidates: Sequence[int], linear: Linear, out: torch.Tensor, chain: Chain | None
) -> tuple[int, tuple[int, ...]]:
    """The kernel that takes the least time, and those that have the bits of the chain.

    The first candidate is chosen unless another is clearly faster; where there is a chain, only kernels with its bits
    are. out: as in the launch that warms up; it is overwritten. The candidates take turns and nothing waits between
    them, so that all are timed at the clocks of a busy GPU; x is random, since products of equal numbers draw less
    power.
    """
    exact = () if chain is None else _exact(run, candidates, linear, out, chain)
    choices = candidates if chain is None else exact
    if len(choices) < 2 or out.shape[0] > _MOST_TIMED:
        return next(iter(choices), candidates[0]), exact
    weight = linear.weight
    copies = 1 + _COLD_BYTES // (weight.numel() * weight.element_size())
    weights = [weight, *(torch.empty_like(weight) for _ in range(copies - 1))]
    for copy in weights[1:]:
        copy.copy_(weight)
    draw = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn((out.shape[0], weight.shape[1]), generator=draw, dtype=weight.dtype, device=weight.device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(choices) + 1)] for _ in range(_ROUNDS + 1)]
    for around in events:
        around[0].record()
        for choice, behind in zip(choices, around[1:], strict=True):
            for copy in weights:
                run(choice, x, replace(linear, weight=copy), out)
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
    weight = linear.weight
    draw = torch.Generator(weight.device).manual_seed(1)
    half = torch.randn((out.shape[0], weight.shape[1] // 2), generator=draw, device=weight.device)
    x = torch.cat((half, half.flip(1).neg_()), 1).to(weight.dtype)
    near = Linear(torch.cat((weight[:, : half.shape[1]], weight[:, : half.shape[1]].flip(1)), 1), linear.bias)
    expected = torch.empty_like(out)
    chain(x, near, expected)
    found = []
    for choice in candidates:
        run(choice, x, near, out)
        found += [choice] if torch.equal(out, expected) else []
    return (*found,)
