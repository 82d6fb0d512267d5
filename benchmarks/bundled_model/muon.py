"""Muon for many small matrices: those of one shape are updated in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

MOMENTUM: Final = 0.95
STEPS: Final = 5
COEFFICIENTS: Final = 3.4445, -4.7750, 2.0315
RMS: Final = 0.2  # of an update, about what AdamW's have


class BatchedMuon(torch.optim.Optimizer):
    """What `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")` does, with launches for each shape and not for each
    matrix: a hybrid's experts alone are 48, and on a GPU their launches would take longer than all else of a step.

    Source: Jordan, 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of the updates: Liu and
    others, 2025, arXiv:2502.16982.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        """matrices: parameters of two dimensions, each of which gets a gradient in every step. Raises ValueError where
        one has other dimensions."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.dim() != 2:
                    raise ValueError(f"Muon updates matrices, and a parameter has the shape {tuple(matrix.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. The state, momentum [matrices, rows, columns], is kept with the first matrix of each shape."""
        assert closure is None
        for group in self.param_groups:
            rate, kept = group["lr"], 1 - group["lr"] * group["weight_decay"]
            shapes: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                gradients = torch.stack([_gradient(matrix) for matrix in matrices])
                state = self.state[matrices[0]]
                if not state:
                    state["momentum"] = torch.zeros_like(gradients)
                momentum: Tensor = state["momentum"].lerp_(gradients, 1 - MOMENTUM)
                updates = orthogonal(gradients.lerp(momentum, MOMENTUM)).to(gradients.dtype)
                torch._foreach_mul_(matrices, kept)
                torch._foreach_add_(matrices, list(updates.unbind()), alpha=-rate * RMS * max(shape) ** 0.5)


def _gradient(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None, "a matrix without a gradient"
    return matrix.grad


def orthogonal(matrices: Tensor) -> Tensor:
    """The same singular vectors with singular values of about 1: [matrices, rows, columns], in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
