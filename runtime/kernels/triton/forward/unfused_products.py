"""Products that stand by themselves, outside of a stream's chain of kernels, such as the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from runahead.runtime.kernels.layers import Linear
from runahead.runtime.kernels.quantized_weight import Fp8Weight
from runahead.runtime.kernels.triton.gemm.cublaslt import exact_product
from runahead.runtime.kernels.triton.gemm.epilogue import EPILOGUES, STORE
from runahead.runtime.kernels.triton.gemm.fp8_gemm import fp8_sums
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gemm.int4_gemm import in_16_bits, in_order
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import small_batch_product
from runahead.runtime.kernels.triton.gemm.tuning import has_many_rows_kernel, rows_in_table, rows_tiling
from runahead.runtime.kernels.triton.gpu.pdl import dependent_launch_works


def sizes_of(weight: torch.Tensor) -> tuple[int, int]:
    """Outputs and depth of a product with it."""
    outputs, depth = weight.shape
    return outputs, depth


def one_sum(x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor) -> None:
    """out = x @ weight.T, each value the sum of one accumulator. x: [T, in]. out: contiguous [T, outputs]."""
    assert isinstance(x, torch.Tensor)
    product_of_rows(x, linear, out)


def sums_of(x: torch.Tensor | Fp8Rows, linear: Linear, num_rows: int, depends: Callable[[bool], bool]) -> torch.Tensor:
    """x @ weight.T without the bias. One sum: by the vendor's library, where it was found to give that, or else by a
    kernel of ours. An FP8 matrix: as `fp8_sums` has it. INT4 is dequantized. x:
    [num_rows, in], or in FP8. depends: see `RowStream`. Returns [num_rows, outputs]."""
    if isinstance(linear.quantized, Fp8Weight):
        return fp8_sums(x, linear, num_rows, depends)
    assert isinstance(x, torch.Tensor)
    if linear.quantized is not None:
        x, linear = in_order(x, linear), in_16_bits(linear)
    out = x.new_empty((x.shape[0], linear.weight.shape[0]))
    exact_product(x, linear.weight, out, one_sum)
    return out


def has_end_inside(linear: Linear, rows: int) -> bool:
    """Return whether one kernel computes this product of many rows with what follows it: bfloat16, not quantized."""
    weight = linear.weight
    is_possible = linear.quantized is None and weight.dtype == torch.bfloat16
    return is_possible and has_many_rows_kernel(rows, *sizes_of(weight))


def product_of_rows(
    hidden: torch.Tensor, linear: Linear, out: torch.Tensor, targets: torch.Tensor | None = None
) -> None:
    """out = hidden @ weight.T + bias, in the order of its segments, without memory for split products. hidden: [R, in].
    linear: weight [outputs, in]. out: [R, outputs]; with targets, int32 [R], the row of `out` for each row."""
    rows = hidden.shape[0]
    tiling = rows_tiling(*sizes_of(linear.weight), rows_in_table(rows), EPILOGUES[STORE], hidden.element_size())
    tiling = replace(tiling, spread=False, dependent=tiling.dependent and dependent_launch_works())
    small_batch_product(hidden, linear, out, STORE, tiling, None, rows, targets=targets)
