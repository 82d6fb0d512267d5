"""Rotary position embedding in NumPy (`norm` says why), half-split convention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.kernels.layers import RopeTable


def rope_factors(table: RopeTable) -> NDArray[np.float32]:
    """Return the factors of a head's halves, for themselves and swapped: [positions, 2, 2, head_dim // 2]."""
    cos, sin = table.cos.numpy(), table.sin.numpy()
    return np.stack((np.stack((cos, cos), axis=1), np.stack((-sin, sin), axis=1)), axis=1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The in-place rotation of an array's heads at a fixed address."""

    halves: NDArray[np.float32]  # [T, heads, 2, head_dim // 2]
    swapped: NDArray[np.float32]  # the same memory, second half first
    product: NDArray[np.float32]  # of the swapped halves, the same shape
    factors: NDArray[np.float32]  # [T, 2, 2, head_dim // 2]
    cos: NDArray[np.float32]  # [T, 1, 2, head_dim // 2], of `factors`
    signed_sin: NDArray[np.float32]

    @staticmethod
    def of(halves: NDArray[np.float32]) -> Rotation:
        """Prepare a rotation. halves: [T, heads, 2, head_dim // 2]."""
        factors = np.empty((halves.shape[0], 2, 2, halves.shape[3]), np.float32)
        return Rotation(
            halves,
            halves[:, :, ::-1],
            np.empty(halves.shape, np.float32),
            factors,
            factors[:, :1],
            factors[:, 1:],
        )

    def turn_to(self, table: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        """Set the positions, once a forward. table: from `rope_factors`. positions: [T], clamped to the table."""
        np.take(table, positions, axis=0, out=self.factors, mode="clip")

    def apply(self) -> None:
        """Rotate. Products and sums are separate calls: each is exactly rounded."""
        np.multiply(self.swapped, self.signed_sin, out=self.product)
        np.multiply(self.halves, self.cos, out=self.halves)
        np.add(self.halves, self.product, out=self.halves)
