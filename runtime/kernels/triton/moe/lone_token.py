"""The experts of a launch's only token, chosen by the programs of its first product: nothing is listed before it."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.triton.moe.routing import LEAST_BLOCK, Routing
from runahead.runtime.kernels.triton.moe.topk import (
    chosen_experts,
    numbers_of_experts,
    routing_weights_of,
    sum_of_a_copy,
)


@dataclass(frozen=True, slots=True)
class LoneToken:
    """The only token of a launch, whose experts its first product chooses. scores: float32 [1, experts or more], of
    experts first. live: int32 [1], more than 0 for a token that is not masked. squares: float64 [tiles or more, n], the
    first column sums of squares of its norm."""

    scores: torch.Tensor
    live: torch.Tensor
    choice: Choice
    squares: torch.Tensor
    tiles: int
    eps: float

    def unrouted(self) -> Routing:
        """What its first product fills: `items` are the experts' numbers, int32 [chosen]."""
        chosen, scores = self.choice.chosen, self.scores
        numbers = torch.empty(chosen, dtype=torch.int32, device=scores.device)
        return Routing(scores.new_empty(chosen), numbers.view(1, -1)[:, :1], numbers, scores, LEAST_BLOCK)


@triton.jit
def lone_expert(
    index, is_first, scores, correction, named, routing_weights, CHOICE: tl.constexpr
):  # fmt: skip
    """The expert that is number `index` of a lone token's own. is_first: the program stores all of them and their
    routing weights for the last product."""
    chosen, indexes, score = chosen_experts(scores, correction, 0 * index, CHOICE)
    e = numbers_of_experts(CHOICE.PADDED, CHOICE.COPIES)
    if is_first:
        weight = routing_weights_of(score, chosen, CHOICE)
        tl.store(named + indexes, e, mask=chosen)
        tl.store(routing_weights + indexes, weight, mask=chosen)
    return sum_of_a_copy(tl.where(chosen & (indexes == index), e, 0))
