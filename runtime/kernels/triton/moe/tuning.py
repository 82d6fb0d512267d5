"""Tilings of the two products of a layer's experts: measured on a GPU for known shapes, in the table of
`gemm/tuning.py`, else a default. No bit depends on a tiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton

from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS
from runahead.runtime.kernels.triton.gemm.tuning import measured_entry
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, current_gpu

FIRST_GATED: Final = 0  # which of an expert's products: out = silu(gate) * up, of the product's two halves
FIRST_SQUARED: Final = 1  # out = relu(product)^2
LAST: Final = 2  # out = product times the token's routing weight
_NAMES: Final = ("gated", "squared", "last")
_MEASURED_ITEMSIZE: Final = 2  # bytes of a weight where the table was measured


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One of the products of a layer's experts. chosen: experts of a token, of `experts`. outputs: of an expert; of
    FIRST_GATED of the gate alone, `up` has the same number. itemsize: bytes of a weight."""

    which: int
    chosen: int
    experts: int
    outputs: int
    depth: int
    itemsize: int

    @property
    def halves(self) -> int:
        return 2 if self.which == FIRST_GATED else 1

    def key(self, tokens: int) -> str:
        """Return the table's key for a number of tokens, rounded up to a power of two."""
        experts = f"{self.chosen}/{self.experts} experts of {self.outputs}x{self.depth}"
        return f"{experts} {_NAMES[self.which]} {triton.next_power_of_2(tokens)}"


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """On the matrix units. rows: outputs of a program. block: of the depth, at a time. stages:
    blocks on their way at a time."""

    rows: int
    block: int
    stages: int
    warps: int


def expert_tiling(product: ExpertProduct, tokens: int, columns: int) -> ExpertTiling:
    """Return the tiling of a product of experts. columns: entries of an item.

    What was not measured has as many bytes on their way as two programs of a multiprocessor have room for: within 4 %
    of the fastest of the shape that was measured (docs/decisions/0036-experts.md). In FP8 a block has the columns with
    one scale of a row, and stages are the fastest of that shape.
    """
    found = measured_entry(product.key(max(tokens, 2))) if product.itemsize == _MEASURED_ITEMSIZE else None
    if found is not None:
        return ExpertTiling(**found)
    itemsize, few = product.itemsize, columns <= 16
    tile = 64 if few else 128
    if itemsize == 1:
        return ExpertTiling(64 // product.halves, FP8_COLUMNS, 8 if tokens == 1 else 4 if few else 3, 4)
    block = max((256 if few else 128) // itemsize, 16)
    while product.depth % block and block > 64 // itemsize:
        block //= 2
    stage, gpu = (tile + columns) * block * itemsize, current_gpu()
    memory = LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory
    return ExpertTiling(tile // product.halves, block, max(2, min(4, memory // 2 // stage)), 4 if few else 8)
