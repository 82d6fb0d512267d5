"""Row-invariant matrix products.

A library chooses its kernel, and with it the order of sums, by the number of rows, the depth and the number of threads.
Two ways were found that keep one order. No library promises either. So a process tries them at its start
(`runahead.runtime.models.cpu_check.cpu_kernels`), uses one that holds, and refuses to start without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from runahead.runtime.kernels.layers import Linear
from runahead.runtime.kernels.quantized_weight import QuantizedWeight
from runahead.runtime.rounding import ceil_div

_COMPILED_ROWS: Final = 64
_SEEN_TO_DIFFER: Final = ((256, 512), (64, 64), (704, 256), (100, 36))  # (in, out) of matrices that were seen to differ


class RowInvarianceError(RuntimeError):
    """A row's bits depended on other rows, on its chunk or on the number of threads. The sentence says when."""


class Product(Protocol):
    """A product with one packed matrix and its bias. x: float32, a multiple of `row_multiple` rows, split by `cut`."""

    def write(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Set out, [n, out], to x @ weight.T + bias."""

    def add(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Add x @ weight.T + bias to out, [n, out]."""


class Products(Protocol):
    """A way of computing products with packed weights for any number of rows."""

    @property
    def row_multiple(self) -> int:
        """The rows of a `Product` are padded to a multiple of this."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weight, [out, in], in the memory format of the products."""

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of the columns of x, [n, in], one for each partial sum of a product."""

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """Bind a product. weight: [out, in], packed, of any dtype. bias: [out]."""


class BlasProducts:
    """torch's products with column-major weights, pairs of rows, and partial sums of at most 352 terms.

    Measured with MKL on AVX-512: one order of sums for every number of rows above 1 and of threads. Row-major weights
    already differ between 8 and 16 rows; deeper sums are split over threads (384 and 512 by 3 or more), or blocked by
    the number of rows. It does not hold on AVX2. It is the fastest for few rows.
    """

    row_multiple = 2
    _depth = 352

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t().contiguous().t()

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        depth = x.shape[1]
        if depth <= self._depth:
            return (x,)
        parts = ceil_div(depth, self._depth)
        width = ceil_div(depth, 16 * parts) * 16  # of equal size, each aligned to a cache line
        return tuple(x[:, first : first + width] for first in range(0, depth, width))

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _BlasProduct:
        parts = tuple(part.t() for part in self.cut(weight.float()))
        return _BlasProduct(parts[0], parts[1:], None if bias is None else bias.float())


@dataclass(frozen=True, slots=True)
class _BlasProduct:
    """A product with a matrix split by its columns. first, rest: float32 [part, out]."""

    first: torch.Tensor
    rest: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None

    def write(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x[0], self.first, out=out)
        else:
            torch.addmm(self.bias, x[0], self.first, out=out)
        self._add_rest(x, out)

    def add(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if self.bias is not None:
            out.add_(self.bias)
        out.addmm_(x[0], self.first)
        self._add_rest(x, out)

    def _add_rest(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        for rank, weight in enumerate(self.rest, start=1):
            out.addmm_(x[rank], weight)


class OneDnnProducts:
    """oneDNN's products of prepacked weights, in pairs of rows, because oneDNN has another kernel for a single row of a
    deep sum.

    Measured one order of sums for every number of rows and threads, on AVX-512 and AVX2, but slower than `BlasProducts`
    on the former.

    oneDNN compiles a kernel for each number of rows of each matrix, about 0.5 MiB and 1 ms, and keeps 1,024 of them. So
    a product of many rows is two products: a multiple of 64 rows, and the rest.
    """

    row_multiple = 2

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return _reorder(weight) if weight.dtype is torch.float32 else weight

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _OneDnnProduct:
        packed = weight if weight.is_mkldnn else _reorder(weight.float())
        return _OneDnnProduct(packed, None if bias is None else bias.float())


@dataclass(frozen=True, slots=True)
class _OneDnnProduct:
    weight: torch.Tensor  # packed
    bias: torch.Tensor | None

    def write(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        for rows in compiled_parts(out.shape[0]):
            out[rows].copy_(self._of(x[0][rows]))

    def add(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        for rows in compiled_parts(out.shape[0]):
            out[rows].add_(self._of(x[0][rows]))

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def compiled_parts(rows: int) -> tuple[slice, ...]:
    """Split a product of this many rows so that few row counts occur: a multiple of 64, and fewer than 64."""
    boundary = rows - rows % _COMPILED_ROWS
    return tuple(part for part in (slice(0, boundary), slice(boundary, rows)) if part.start < part.stop)


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


@dataclass(frozen=True, slots=True)
class _DequantizedProduct:
    """A product that dequantizes its matrix each time, so that it has the bits of the matrix in its dtype."""

    products: Products
    weight: QuantizedWeight
    bias: torch.Tensor | None

    def write(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self._bound().write(x, out)

    def add(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self._bound().add(x, out)

    def _bound(self) -> Product:
        return self.products.bind(self.products.pack(self.weight.dequantized()), self.bias)


def bound_product(products: Products, linear: Linear) -> Product:
    """Return the product of a layer with a plain or quantized weight."""
    if linear.quantized is not None:
        assert isinstance(linear.quantized, QuantizedWeight)
        return _DequantizedProduct(products, linear.quantized, linear.bias)
    return products.bind(linear.weight, linear.bias)


def linear(products: Products, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x @ weight.T + bias, float32 [n, out]. x: float32 [n, in], any n. weight: [out, in], packed."""
    rows, depth = x.shape
    padded = rows + -rows % products.row_multiple
    if padded != rows:
        copy = np.zeros((padded, depth), np.float32)
        copy[:rows] = x.numpy()
        x = torch.from_numpy(copy)
    out = torch.empty((padded, weight.shape[0]))
    products.bind(weight, bias).write(products.cut(x), out)
    return out[:rows]


def product_ways() -> tuple[Products, ...]:
    """Return all ways of computing products, the fastest first."""
    return BlasProducts(), OneDnnProducts()


def choose_products() -> Products:
    """Return the fastest row-invariant products of this machine, with torch's current number of threads.

    Raises RowInvarianceError if there is none.
    """
    for products in product_ways():
        if rows_keep_their_bits(products):
            return products
    raise RowInvarianceError("on this machine a row of a product depends on how many rows there are")


def rows_keep_their_bits(products: Products, shapes: Sequence[tuple[int, int]] = _SEEN_TO_DIFFER, few: int = 3) -> bool:
    """Compare products of many rows with products of `few` rows at a time.

    shapes: (in, out) of the matrices; the default ones take a few milliseconds.
    """
    generator = torch.Generator().manual_seed(0)
    for depth, out in shapes:
        weight = products.pack(torch.randn((out, depth), generator=generator))
        x = torch.randn((264, depth), generator=generator)
        expected = torch.cat([linear(products, part, weight) for part in x.split(few)])
        for rows in (1, 2, 5, 8, 9, 16, 32, 72, 200, 264):
            first = (264 - rows) // 2
            if not torch.equal(linear(products, x[first : first + rows], weight), expected[first : first + rows]):
                return False
    return True
