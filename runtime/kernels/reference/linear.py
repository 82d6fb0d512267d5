"""Matrix products whose rows do not know of each other.

A library's product picks its kernel, and with it the order of its sums, from the number of rows, the depth of the sum
and the number of threads. Two ways were found to hold it to one order. Neither is promised by a library: which one a
process uses is decided by trying, and the row-invariance self-test fails where neither holds.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Products(Protocol):
    """Products of any number of rows with packed weights."""

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this; who pads them beforehand saves a copy."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: [out, in]. Returns the same matrix in the memory format that `linear` reads."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in]. weight: [out, in], packed. bias: [out]. Returns [n, out]."""


class BlasProducts:
    """torch's own products: weights stored by columns, rows in multiples of 4, sums cut at a fixed depth.

    Measured with MKL on AVX-512: one order of sums for every number of rows above 1 and of threads. Stored by rows,
    8 and 16 rows already differ; deeper sums are split over threads, or blocked by the number of rows. On AVX2 this
    does not hold at all. It is also the fastest for few rows.
    """

    row_multiple = 4
    _depth = 512

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t().contiguous().t()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, depth = x.shape
        x = _pad(x, self.row_multiple)
        if depth <= self._depth:
            out = F.linear(x, weight, bias)
        else:
            parts = zip(x.split(self._depth, dim=1), weight.split(self._depth, dim=1), strict=True)
            out = F.linear(*next(parts), bias)
            for x_part, weight_part in parts:
                out.addmm_(x_part, weight_part.t())
        return out[:rows]


class OneDnnProducts:
    """oneDNN's products of prepacked weights, rows in pairs: a single row of a deep sum is another kernel.

    Measured one order of sums for every number of rows and threads, on AVX-512 and AVX2, slower than `BlasProducts` on
    the former. float32 alone is packed: other dtypes take torch's product, and may differ.
    """

    row_multiple = 2

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype is not torch.float32:
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return packed

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not weight.is_mkldnn:
            return F.linear(x, weight, bias)
        padded = _pad(x, self.row_multiple)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
        return out[: x.shape[0]]


def _pad(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x: [n, in], with rows of zeros appended."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def choose_products() -> Products:
    """The fastest products that keep their rows' bits here, with as many threads as torch has now."""
    blas = BlasProducts()
    return blas if rows_keep_their_bits(blas) else OneDnnProducts()


def rows_keep_their_bits(products: Products) -> bool:
    """Tries shapes that were seen to differ, a few milliseconds of work."""
    generator = torch.Generator().manual_seed(0)
    for depth, out in ((256, 512), (64, 64), (704, 256), (100, 36)):
        weight = products.pack(torch.randn((out, depth), generator=generator))
        x = torch.randn((264, depth), generator=generator)
        few = torch.cat([products.linear(part, weight) for part in x.split(3)])
        for rows in (1, 2, 5, 8, 9, 16, 32, 72, 200, 264):
            first = (264 - rows) // 2
            if not torch.equal(products.linear(x[first : first + rows], weight), few[first : first + rows]):
                return False
    return True
