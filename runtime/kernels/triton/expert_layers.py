"""A feed-forward of experts as streams compute it: by routing, two products over items, and a sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Experts, Linear, Norm, SharedExpert
from runahead.runtime.kernels.triton.expert_products import (
    FIRST_GATED,
    FIRST_SQUARED,
    LAST,
    expert_product,
    expert_sums,
)
from runahead.runtime.kernels.triton.expert_row import experts_of_one_row
from runahead.runtime.kernels.triton.routing import route
from runahead.runtime.kernels.triton.row_product import GATED, SQUARED


def _as_launched(wanted: bool) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of a layer, all of a kind as one matrix after the other. A product of them has no bias. share: of the
    shared expert, as a product of one output; None where it has none."""

    weights: Experts
    gate_up: torch.Tensor  # [own experts, 2 * width, hidden], or [own experts, width, hidden] without gates
    down: torch.Tensor  # [own experts, hidden, width]
    share: Linear | None = None

    @staticmethod
    def of(weights: Experts) -> PackedExperts:
        shared = weights.shared
        share = None if shared is None or shared.share is None else Linear(shared.share[None], None)
        return PackedExperts(weights, _whole(weights.gate_up), _whole(weights.down), share)

    @property
    def has_gates(self) -> bool:
        return self.weights.activation == "silu"

    @property
    def epilogue(self) -> int:
        """What follows the first product of the shared expert."""
        return GATED if self.has_gates else SQUARED

    @property
    def shared(self) -> SharedExpert | None:
        """What every token gets beside its experts. Its products are the streams' own."""
        return self.weights.shared

    def results(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        live: torch.Tensor,
        arrived: torch.Tensor,
        depends: Callable[[bool], bool] = _as_launched,
        squares: tuple[torch.Tensor, int, float] | None = None,
    ) -> torch.Tensor:
        """What each of T tokens gets from each of its experts, times its share: float32 [T * chosen, hidden], of a
        token by ascending expert; of tokens that are not live anything, and zeros from experts of other ranks.

        x: the norm of the residual, [T, hidden]; with squares, as `route` has them, what its scale is still to be
        applied to. scores: float32 [T, experts]. live: int [T]. arrived: as `route` has it. depends: says of the next
        kernel whether it is launched programmatically.
        """
        weights, (_, hidden, width) = self.weights, self.down.shape
        chosen = weights.chosen
        routed = route(
            scores, live, weights.choice, arrived, share=weights.share, squares=squares, depth=hidden,
            dependent=depends(True),
        )  # fmt: skip
        entries = x.shape[0] * chosen
        gated = x.new_empty((entries, width))
        scaled = squares is not None
        expert_product(
            x, self.gate_up, routed, chosen, gated, FIRST_GATED if self.has_gates else FIRST_SQUARED, scaled=scaled,
            dependent=depends(True),
        )  # fmt: skip
        made = torch.empty if weights.share.is_whole else torch.zeros
        found = made((entries, hidden), dtype=torch.float32, device=x.device)
        expert_product(gated, self.down, routed, chosen, found, LAST, dependent=depends(True))
        return found

    def add(
        self,
        results: torch.Tensor,
        live: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        scaled: torch.Tensor,
        squares: torch.Tensor,
        *,
        dependent: bool,
    ) -> int:
        """residual += the sum of a token's `results`, [T, hidden]; scaled and squares are made for the norm that
        follows, if there is one. Returns how many tiles the squares have."""
        made = (None, None, None) if norm is None else (norm.weight, scaled, squares)
        gamma, scaled_out, squares_out = made
        return expert_sums(
            results,
            live,
            self.weights.chosen,
            residual,
            added=True,
            gamma=gamma,
            scaled=scaled_out,
            squares=squares_out,
            dependent=dependent,
        )

    def made(self, results: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """The sum of a token's `results` by itself, rounded to the model's dtype: [T, hidden]."""
        out = self.down.new_empty((live.shape[0], self.down.shape[1]))
        expert_sums(results, live, self.weights.chosen, out, added=False)
        return out

    def add_of_one_row(
        self, residual: torch.Tensor, scores: torch.Tensor, live: torch.Tensor, *, dependent: bool
    ) -> None:
        """The whole feed-forward of a lone row, but for its scores, float32 [1, experts]. residual: [1, hidden]."""
        weights = self.weights
        experts_of_one_row(
            residual,
            scores,
            live,
            weights.norm,
            self.gate_up,
            self.down,
            weights.choice,
            share=weights.share,
            has_gates=self.has_gates,
            dependent=dependent,
        )


def live_tokens(batch: ForwardBatch) -> torch.Tensor:
    """More than 0 for query tokens of rows that are not masked, and 0 for others and padding: int32 [T]."""
    if batch.is_decode and batch.decode_queries == 1:
        return batch.seq_lens
    ends = batch.query_start_loc[1:]
    token = torch.arange(batch.num_tokens, dtype=torch.int32, device=ends.device)
    row = torch.searchsorted(ends, token, right=True).clamp(max=batch.num_rows - 1)
    return batch.seq_lens[row].masked_fill(token >= ends[-1], 0)


def _whole(linears: tuple[Linear, ...]) -> torch.Tensor:
    """[n, out, in]: the memory in which weights lie one behind the other, as a checkpoint's do, or a copy."""
    weights = [linear.weight for linear in linears]
    assert all(linear.bias is None for linear in linears)
    first = weights[0]
    size, begin, storage = first.numel(), first.storage_offset(), first.untyped_storage().data_ptr()
    if all(
        weight.is_contiguous()
        and weight.untyped_storage().data_ptr() == storage
        and weight.storage_offset() == begin + number * size
        for number, weight in enumerate(weights)
    ):
        outputs, depth = first.shape
        return first.as_strided((len(weights), outputs, depth), (size, depth, 1))
    return torch.stack(weights)
