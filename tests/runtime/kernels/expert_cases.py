"""Layers of random experts with their tokens, and what they should make of these: for tests of experts' kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.layers import ExpertActivation, Experts, Linear, Norm, SharedExpert  # noqa: E402
from runahead.runtime.kernels.reference import experts as reference  # noqa: E402
from runahead.runtime.kernels.triton.moe.layer import PackedExperts  # noqa: E402

HALF = torch.bfloat16
CLOSE: Final = {torch.float32: 1e-5, HALF: 1e-2}


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def scores_for(kind: str, tokens: int, experts: int) -> torch.Tensor:
    scores = drawn(tokens, experts, seed=tokens)
    if kind == "all choose one":
        scores[:, experts // 2] += 50.0
    elif kind == "ties":
        scores = (2 * scores).round()
    return scores


def by_the_reference(scores: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token by ascending number, and their shares. [T, chosen]"""
    own = choice if choice.correction is None else replace(choice, correction=choice.correction.cpu())
    named, shares = map(torch.from_numpy, reference.chosen_experts(scores.cpu().clone().numpy(), own))
    named, order = named.sort(1)
    return named, shares.gather(1, order)


@dataclass(frozen=True, slots=True)
class Case:
    """A layer of random experts, its tokens, which of them live, and their scores."""

    packed: PackedExperts
    x: torch.Tensor  # [T, hidden]
    live: torch.Tensor  # int32 [T]
    scores: torch.Tensor  # float32 [T, experts], and one more where a shared expert has a share

    @staticmethod
    def of(
        tokens: int,
        experts: int,
        chosen: int | Choice,
        kind: str,
        dtype: torch.dtype,
        hidden: int = 64,
        width: int = 64,
        activation: ExpertActivation = "silu",
        shared: SharedExpert | None = None,
    ) -> Case:
        def linears(rows: int, columns: int, seed: int) -> tuple[Linear, ...]:
            every = (drawn(experts, rows, columns, seed=seed) * columns**-0.5).to(DEVICE, dtype)
            return tuple(Linear(weight, None) for weight in every)

        gate_up, down = linears((2 if activation == "silu" else 1) * width, hidden, 1), linears(hidden, width, 2)
        norm = Norm(torch.ones(hidden, dtype=dtype, device=DEVICE), 1e-6)
        router = Linear(drawn(experts, hidden, seed=4).to(DEVICE, dtype), None)
        choice = Choice(chosen, renormalised=True) if isinstance(chosen, int) else chosen
        packed = PackedExperts.of(Experts(norm, router, gate_up, down, choice, shared, activation))
        assert isinstance(packed.gate_up, torch.Tensor)
        assert packed.gate_up.data_ptr() == gate_up[0].weight.data_ptr(), "what lies packed was copied"
        live = torch.arange(tokens) % 4 != 2
        x = drawn(tokens, hidden, seed=3).to(DEVICE, dtype)
        scores = scores_for(kind, tokens, experts)
        if packed.scored > experts:
            scores = torch.cat((scores, drawn(tokens, 1, seed=5)), 1)
        return Case(packed, x, live.int().to(DEVICE), scores.to(DEVICE))

    def some(self, tokens: list[int]) -> Case:
        return Case(self.packed, self.x[tokens], self.live[tokens], self.scores[tokens])

    def made(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        """What experts make of the tokens, the shared one too, [T, hidden]. scale: of each token, [T], which kernels
        find in sums of squares, and apply themselves."""
        arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        squares = None
        if scale is not None:
            mean = scale.double().pow(-2) - 1e-6
            squares = (mean * self.x.shape[1])[None, :].to(DEVICE), 1, 1e-6
        results = self.packed.results(self.x, self.scores, self.live, arrived, squares=squares)
        return self.packed.made(results, self.live).cpu()

    def added_to_a_lone_row(self) -> torch.Tensor:
        """The only token's residual, which is x, behind the layer: [1, hidden]."""
        residual, scaled, norm = self.x.clone(), self.x.clone(), self.packed.weights.norm
        squares = torch.zeros(self.x.shape[1], 8, dtype=torch.float64, device=DEVICE)
        squares[0, 0] = self.x.double().pow(2).sum()
        arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        found = self.packed.results(self.x, self.scores, self.live, arrived, squares=(squares, 1, norm.eps))
        self.packed.add(found, self.live, residual, norm, scaled, squares, dependent=False)
        return residual.cpu()

    def expected_of_a_lone_row(self) -> torch.Tensor:
        """The same in float64."""
        root = self.x.double().pow(2).mean().add(1e-6).sqrt().cpu()
        normed = Case(self.packed, (self.x.cpu() / root).to(DEVICE, torch.float32), self.live, self.scores)
        return self.x.double().cpu() + normed.expected()

    def expected(self) -> torch.Tensor:
        """The same in float64."""
        x, weights = self.x.double().cpu(), self.packed.weights
        count, shared = weights.count, weights.shared
        named, shares = by_the_reference(self.scores[:, :count], weights.choice)
        total = torch.zeros_like(x)
        for token in self.live.nonzero()[:, 0].tolist():
            for share, expert in zip(shares[token].tolist(), named[token].tolist(), strict=True):
                total[token] += share * self._of_one(weights.gate_up[expert], weights.down[expert], x[token])
            if shared is not None:
                share = 1.0 if shared.gate is None else self.scores[token, count].double().sigmoid().item()
                total[token] += share * self._of_one(shared.gate_up, shared.down, x[token])
        return total

    def _of_one(self, first: Linear, last: Linear, x: torch.Tensor) -> torch.Tensor:
        both, width = multiplied(first, x), last.weight.shape[1]
        gated = torch.nn.functional.silu(both[:width]) * both[width:] if self.packed.has_gates else both.relu().square()
        return multiplied(last, gated)


def multiplied(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """In float64."""
    product = linear.weight.double().cpu() @ x
    return product if linear.bias is None else product + linear.bias.double().cpu()
