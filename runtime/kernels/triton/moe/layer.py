"""A feed-forward layer of experts: routing, two grouped products, and a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from runahead.runtime.kernels.activations import has_gate
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Experts, Linear, Norm, SharedExpert
from runahead.runtime.kernels.quantized_weight import ExpertFp8
from runahead.runtime.kernels.triton.moe.grouped_gemm import LoneToken, SharedProduct, expert_product
from runahead.runtime.kernels.triton.moe.routing import route
from runahead.runtime.kernels.triton.moe.sums import expert_sums
from runahead.runtime.kernels.triton.moe.tuning import FIRST_GATED, FIRST_SQUARED, LAST
from runahead.runtime.rounding import ceil_div


def _as_launched(wanted: bool) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a layer's experts for T tokens, float32; undefined for masked tokens. of_chosen: of each chosen
    expert, by ascending number, times its routing weight, [T * chosen, hidden]. of_shared: of the shared expert, in
    pieces, [T, pieces, hidden]; None: there is none."""

    of_chosen: torch.Tensor
    of_shared: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of a layer, with the matrices of all experts stacked. Their products have no bias. router: computes
    a token's scores; the score of the shared expert's gate, if there is one, comes last."""

    weights: Experts
    gate_up: torch.Tensor | ExpertFp8  # [experts, 2 * width, hidden], or [experts, width, hidden] without gates
    down: torch.Tensor | ExpertFp8  # [experts, hidden, width]
    router: Linear

    @staticmethod
    def of(weights: Experts) -> PackedExperts:
        return PackedExperts(weights, _whole(weights.gate_up), _whole(weights.down), router_of(weights))

    @property
    def scored(self) -> int:
        """Number of a token's scores."""
        return self.router.weight.shape[0]

    @property
    def has_gates(self) -> bool:
        return has_gate(self.weights.activation)

    @property
    def shared(self) -> SharedExpert | None:
        """The expert of all tokens, or None."""
        return self.weights.shared

    def results(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        live: torch.Tensor,
        arrived: torch.Tensor,
        depends: Callable[[bool], bool] = _as_launched,
        squares: tuple[torch.Tensor, int, float] | None = None,
    ) -> Results:
        """Compute the results of T tokens' experts and of the shared expert.

        x: the norm of the residual, [T, hidden]; with squares (see `route`) before its scale is applied. scores:
        float32 [T, scored]. live: int [T]. arrived: see `route`. depends: returns whether the next kernel is launched
        programmatically. The first product of a lone row also routes it.
        """
        weights, (_, hidden, width) = self.weights, self.down.shape
        chosen, lone = weights.chosen, None
        if x.shape[0] == 1 and squares is not None:
            lone = LoneToken(scores, live, weights.choice, *squares)
            routed = lone.unrouted()
        else:
            routed = route(
                scores, live, weights.choice, arrived, beside=self.scored - weights.count, squares=squares,
                depth=hidden, dependent=depends(True),
            )  # fmt: skip
        entries = x.shape[0] * chosen
        gated = x.new_empty((entries, width))
        scaled = squares is not None
        found = torch.empty((entries, hidden), dtype=torch.float32, device=x.device)
        first = last = of_shared = None
        if weights.shared is not None:
            first, last = self._products_of_shared(weights.shared, x, scores)
            of_shared = last.out
        expert_product(
            x, self.gate_up, routed, chosen, gated, FIRST_GATED if self.has_gates else FIRST_SQUARED, scaled=scaled,
            shared=first, lone=lone, dependent=depends(True),
        )  # fmt: skip
        expert_product(gated, self.down, routed, chosen, found, LAST, shared=last, lone=lone, dependent=depends(True))
        return Results(found, of_shared)

    def _products_of_shared(
        self, shared: SharedExpert, x: torch.Tensor, scores: torch.Tensor
    ) -> tuple[SharedProduct, SharedProduct]:
        (tokens, hidden), width = x.shape, shared.width
        between = x.new_empty((tokens, width))
        pieces = ceil_div(width, self.down.shape[2])
        of_shared = torch.empty((tokens, pieces, hidden), dtype=torch.float32, device=x.device)
        scores_of_gate = None if shared.gate is None else scores
        return (
            SharedProduct(shared.gate_up, width, x, between),
            SharedProduct(shared.down, width, between, of_shared, scores_of_gate),
        )

    def add(
        self,
        results: Results,
        live: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        scaled: torch.Tensor,
        squares: torch.Tensor,
        *,
        dependent: bool,
    ) -> int:
        """Add the sum of each token's `results` to residual, [T, hidden], and compute scaled and squares for the next
        norm, if there is one. Returns the number of tiles of squares."""
        made = (None, None, None) if norm is None else (norm.weight, scaled, squares)
        gamma, scaled_out, squares_out = made
        return expert_sums(
            results.of_chosen,
            live,
            self.weights.chosen,
            residual,
            of_shared=results.of_shared,
            added=True,
            gamma=gamma,
            scaled=scaled_out,
            squares=squares_out,
            dependent=dependent,
        )

    def made(self, results: Results, live: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's `results`, rounded to the model's dtype: [T, hidden]."""
        down = self.weights.down[0].weight
        out = torch.empty((live.shape[0], len(down)), dtype=down.dtype, device=live.device)
        expert_sums(results.of_chosen, live, self.weights.chosen, out, of_shared=results.of_shared, added=False)
        return out


def live_tokens(batch: ForwardBatch) -> torch.Tensor:
    """Return int32 [T], more than 0 for query tokens of unmasked rows, 0 for others and padding."""
    if batch.is_decode and batch.decode_queries == 1:
        return batch.seq_lens
    ends = batch.query_start_loc[1:]
    token = torch.arange(batch.num_tokens, dtype=torch.int32, device=ends.device)
    row = torch.searchsorted(ends, token, right=True).clamp(max=batch.num_rows - 1)
    return batch.seq_lens[row].masked_fill(token >= ends[-1], 0)


def router_of(weights: Experts) -> Linear:
    """Return the router with the row of the shared expert's gate appended, if there is one."""
    router, shared = weights.router, weights.shared
    if shared is None or shared.gate is None:
        return router
    bias = None if router.bias is None else torch.cat((router.bias, router.bias.new_zeros(1)))
    return Linear(_joined((router.weight, shared.gate[None])), bias)


def scored_by(weights: Experts) -> int:
    """Outputs of `router_of`."""
    has_gate = weights.shared is not None and weights.shared.gate is not None
    return weights.router.weight.shape[0] + has_gate


def _whole(linears: tuple[Linear, ...]) -> torch.Tensor | ExpertFp8:
    """[n, out, in], as `_joined` has them."""
    assert all(linear.bias is None for linear in linears)
    quantized = [linear.quantized for linear in linears if isinstance(linear.quantized, ExpertFp8)]
    if not quantized:
        return _stacked([linear.weight for linear in linears])
    numbers, scales = [one.numbers for one in quantized], [one.scales for one in quantized]
    return replace(quantized[0], numbers=_stacked(numbers), scales=_stacked(scales))


def _stacked(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, out, in], as `_joined` has them."""
    return _joined(matrices).view(len(matrices), *matrices[0].shape)


def _joined(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows, [all, in]: a view if the matrices are adjacent in memory, as in a checkpoint, else a copy."""
    first = matrices[0]
    storage, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    for matrix in matrices:
        index = matrix.untyped_storage().data_ptr(), matrix.storage_offset()
        if index != (storage, begin) or not matrix.is_contiguous():
            return torch.cat(list(matrices))
        begin += matrix.numel()
    return first.as_strided((sum(len(matrix) for matrix in matrices), first.shape[1]), first.stride())
