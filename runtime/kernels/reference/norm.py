"""RMS norm and the gated activations, row by row, in NumPy.

A decode step streams every weight through the processor's caches, so that the small operations between two products
find neither their code nor their data in a cache. NumPy runs the least code there. It also never divides an array among
threads: an element's arithmetic depends on its column alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.kernels.layers import GELU_CUBE, GELU_SLOPE, Norm


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A `Norm` as NumPy reads it."""

    weight: NDArray[np.float32]  # [n]
    eps: np.float32

    @staticmethod
    def of(norm: Norm) -> NormWeight:
        return NormWeight(norm.weight.float().numpy(), np.float32(norm.eps))


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """The RMS norm of an array, prepared once: the numbers in the arrays may change, their addresses may not.
    Everything is float32."""

    x: NDArray[np.float32]  # [..., n]
    out: NDArray[np.float32]  # [..., n], may be x
    rows: NDArray[np.float32]  # [..., 1, n], x
    columns: NDArray[np.float32]  # [..., n, 1], x
    squares: NDArray[np.float32]  # [..., 1, 1] sums over a row
    scale: NDArray[np.float32]  # [..., 1], the same memory
    share: np.float32  # 1 / n

    @staticmethod
    def of(x: NDArray[np.float32], out: NDArray[np.float32]) -> RmsNorm:
        squares = np.empty((*x.shape[:-1], 1, 1), np.float32)
        return RmsNorm(
            x,
            out,
            x[..., None, :],
            x[..., :, None],
            squares,
            squares[..., 0],
            np.float32(1.0 / x.shape[-1]),
        )

    def apply(self, norm: NormWeight) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight.

        Only the mean is a sum, one dot product a row; what follows is exactly rounded, element by element.
        """
        scale, out = self.scale, self.out
        np.matmul(self.rows, self.columns, out=self.squares)
        np.multiply(scale, self.share, out=scale)
        np.add(scale, norm.eps, out=scale)
        np.sqrt(scale, out=scale)
        np.divide(self.x, scale, out=out)
        np.multiply(out, norm.weight, out=out)


def silu_mul(gate: NDArray[np.float32], up: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out = silu(gate) * up. All [rows, n]; out overlaps neither. A gate far below zero overflows to the right zero."""
    np.negative(gate, out=out)
    _sigmoid_mul(gate, up, out)


def gelu_mul(gate: NDArray[np.float32], up: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out = gelu(gate) * up, where gelu(x) = x * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (x + 0.044715 * x^3). All
    [rows, n]; out overlaps neither. (1 + tanh(z)) / 2 is the logistic function of 2 * z.

    Source: Hendrycks and Gimpel, 2016, "Gaussian Error Linear Units".
    """
    np.multiply(gate, gate, out=out)
    np.multiply(out, np.float32(GELU_CUBE), out=out)
    np.add(out, np.float32(1.0), out=out)
    np.multiply(out, gate, out=out)
    np.multiply(out, np.float32(-GELU_SLOPE), out=out)
    _sigmoid_mul(gate, up, out)


def bound(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    """x = cap * tanh(x / cap), of any shape. Returns x."""
    np.divide(x, np.float32(cap), out=x)
    np.tanh(x, out=x)
    return np.multiply(x, np.float32(cap), out=x)


def squared_relu(x: NDArray[np.float32]) -> None:
    """x = max(x, 0)^2, of any shape. A NaN stays one."""
    np.maximum(x, np.float32(0.0), out=x)
    np.multiply(x, x, out=x)


def logistic_mul(gate: NDArray[np.float32], x: NDArray[np.float32]) -> None:
    """x *= 1 / (1 + exp(-gate)). Both [rows, n]; gate is lost."""
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    np.add(gate, np.float32(1.0), out=gate)
    np.divide(x, gate, out=x)


def _sigmoid_mul(gate: NDArray[np.float32], up: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out = gate / (1 + exp(out)) * up."""
    np.exp(out, out=out)
    np.add(out, np.float32(1.0), out=out)
    np.divide(gate, out, out=out)
    np.multiply(out, up, out=out)
