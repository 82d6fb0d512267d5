"""Products of a stream by the vendor's library, or with FP8 matrices, each with a kernel for what follows it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, Fp8Weight
from runahead.runtime.kernels.triton.forward.unfused_products import sums_of
from runahead.runtime.kernels.triton.gemm.epilogue import GATED
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled, finish_in_fp8, finish_product
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual

Squares = tuple[torch.Tensor, int, float] | None  # as `small_batch_product` has them
Depends = Callable[[bool], bool]


class SeparateProducts:
    """The products and the residual between them.

    rows: query tokens of the stream. sums: its residual. The methods' `depends`: whether the next kernel is launched
    programmatically, if that is wanted. It is a method of the stream, and is not kept here: a cycle of references would
    keep the memory of a launch until the garbage collector runs.
    """

    def __init__(self, rows: int, sums: Residual) -> None:
        self._rows, self._sums = rows, sums
        self._scaled: Fp8Rows | None = None  # `sums.scaled` in FP8

    def forget(self) -> None:
        """The residual changes."""
        self._scaled = None

    def values(
        self, x: torch.Tensor | Fp8Rows, linear: Linear, squares: Squares, epilogue: int, depends: Depends,
        activation: Activation = "silu",
    ) -> torch.Tensor:  # fmt: skip
        """As `finish_product` has them, [rows, outputs]. x: bfloat16 [rows, in], or in FP8."""
        made = self._of(x, linear, depends)
        return finish_product(made, linear, squares, epilogue, activation, dependent=depends(True))

    def gated_in_fp8(
        self, x: torch.Tensor, linear: Linear, squares: Squares, depends: Depends, activation: Activation
    ) -> Fp8Rows:
        """The gated values of a product that a product with an FP8 matrix reads."""
        made = self._of(x, linear, depends)
        return finish_in_fp8(made, linear, squares, GATED, activation, dependent=depends(True))

    def add(
        self, x: torch.Tensor | Fp8Rows, linear: Linear, norm: Norm, depends: Depends, squares: Squares = None
    ) -> None:
        """`sums.values += ` the product's values. norm: that follows, for which the rest of `sums` is made, with one
        tile of squares; after an FP8 product in FP8 too. squares: of the norm of x."""
        made, sums = self._of(x, linear, depends), self._sums
        self._scaled = add_scaled(
            made, linear, sums.values, norm, sums.scaled, sums.squares, squares,
            in_fp8=isinstance(linear.quantized, Fp8Weight) and made.shape[1] % FP8_COLUMNS == 0,
            dependent=depends(True),
        )  # fmt: skip

    def _of(self, x: torch.Tensor | Fp8Rows, linear: Linear, depends: Depends) -> torch.Tensor:
        if x is self._sums.scaled and isinstance(linear.quantized, Fp8Weight) and self._scaled is not None:
            x = self._scaled
        return sums_of(x, linear, self._rows, depends)
