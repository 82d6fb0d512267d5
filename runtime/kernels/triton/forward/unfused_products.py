"""Products that stand by themselves, outside of a stream's chain of kernels: of a router, a shared expert, the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as functional

from runahead.runtime.kernels.layers import Linear
from runahead.runtime.kernels.quantized_weight import Fp8Weight
from runahead.runtime.kernels.triton.gemm.cublaslt import cublaslt_product, exact_product
from runahead.runtime.kernels.triton.gemm.fp8_gemm import fp8_sums
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gemm.gemv import EPILOGUES, STORE, gemv_product
from runahead.runtime.kernels.triton.gemm.int4_gemm import in_16_bits, in_order
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import small_batch_product
from runahead.runtime.kernels.triton.gemm.tuning import (
    chain_of,
    has_chains_of_many_rows,
    row_tiling,
    rows_in_table,
    rows_tiling,
    segments,
    takes_depth,
)
from runahead.runtime.kernels.triton.gpu.pdl import dependent_launch_works
from runahead.runtime.kernels.triton.moe.layer import PackedExperts
from runahead.runtime.kernels.triton.ops.activation import gated_mul, squared_relu_of
from runahead.runtime.kernels.triton.ops.gates import logistic_mul


def sizes_of(weight: torch.Tensor) -> tuple[int, int]:
    """Outputs and depth of a product with it."""
    outputs, depth = weight.shape
    return outputs, depth


def scores_of(x: torch.Tensor, router: Linear) -> torch.Tensor:
    """float32, from sums that are rounded to nothing else. x: normalised, [T, hidden]. Returns [T, scored], as
    `PackedExperts` has it."""
    if x.dtype != torch.bfloat16 or not takes_depth(x.shape[1]):
        return functional.linear(x.float(), router.weight.float(), None if router.bias is None else router.bias.float())
    out = torch.empty((x.shape[0], router.weight.shape[0]), dtype=torch.float32, device=x.device)
    product_of_rows(x, router, out)
    return out


def with_shared(x: torch.Tensor, made: torch.Tensor, scores: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """What a token gets of its experts, and of the shared one if there is one, by the vendor's products. x: normalised,
    [T, hidden]. made: of its experts, [T, hidden]. scores: [T, scored]."""
    shared = experts.shared
    if shared is None:
        return made
    made_of_x = cublaslt_product(x, shared.gate_up)
    gated = gated_mul(made_of_x) if experts.has_gates else squared_relu_of(made_of_x)
    of_shared = cublaslt_product(gated, shared.down)
    if shared.share is not None:
        logistic_mul(of_shared, scores[:, experts.weights.count :])
    return torch.add(made, of_shared)


def one_sum(x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor) -> None:
    """out = x @ weight.T, each value the sum of one accumulator. x: [T, in]. out: contiguous [T, outputs]."""
    assert isinstance(x, torch.Tensor)
    product_of_rows(x, linear, out, exact=True)


def sums_of(x: torch.Tensor | Fp8Rows, linear: Linear, num_rows: int, depends: Callable[[bool], bool]) -> torch.Tensor:
    """x @ weight.T without the bias. One sum: by the vendor's library, where it was found to give that, or else by a
    kernel of ours. Several segments: where `has_chains_of_many_rows`. An FP8 matrix: as `fp8_sums` has it. INT4 is
    dequantized. x: bfloat16 [num_rows, in], or in FP8. depends: see `RowStream`. Returns [num_rows, outputs]."""
    if isinstance(linear.quantized, Fp8Weight):
        return fp8_sums(x, linear, num_rows, depends)
    assert isinstance(x, torch.Tensor)
    has_chains = linear.quantized is None and has_chains_of_many_rows(*sizes_of(linear.weight))
    if linear.quantized is not None:
        x, linear = in_order(x, linear), in_16_bits(linear)
    out = x.new_empty((x.shape[0], linear.weight.shape[0]))
    if has_chains:
        _in_chains(x, linear.weight, out)
    else:
        exact_product(x, linear.weight, out, one_sum)
    return out


def _in_chains(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = x @ weight.T in its segments."""
    # Gluon is experimental and may change: import it only where it is needed.
    from runahead.runtime.kernels.triton.gemm.chains_hopper import chains_product

    splits = segments(*sizes_of(weight))
    chains_product(x.contiguous(), weight, out, splits, chain_of(weight.shape[1], splits))


def head_of_one_row(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """The logits of one row. hidden: [1, hidden]. weight: [vocab, hidden]. out: float32 [n, vocab]. places: int32 [1],
    the row of `out` to which they go."""
    tiling = row_tiling(*sizes_of(weight), EPILOGUES[STORE])
    dependent = tiling.dependent and dependent_launch_works()
    gemv_product(hidden, Linear(weight, None), None, out, STORE, replace(tiling, dependent=dependent), places)


def product_of_rows(
    hidden: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    exact: bool = False,
    places: torch.Tensor | None = None,
) -> None:
    """out = hidden @ weight.T + bias, on the matrix units, without memory for split products. hidden: [R, in]. linear:
    weight [outputs, in]. exact: in its segments; otherwise in one part, which a vocabulary is large enough for. out:
    [R, outputs]; with places, int32 [R], rows of any number, of which each row goes to its own place."""
    rows = hidden.shape[0]
    tiling = rows_tiling(*sizes_of(linear.weight), rows_in_table(rows), EPILOGUES[STORE], exact)
    splits = tiling.splits if tiling.direct or exact else 1
    tiling = replace(tiling, splits=splits, spread=False, dependent=tiling.dependent and dependent_launch_works())
    small_batch_product(hidden, linear, out, STORE, tiling, None, rows, places=places, chained=exact)
