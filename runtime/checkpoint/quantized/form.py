"""The interface of stored matrices that may stay quantized, whatever the file's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NumberForm:
    """How a matrix is stored: (number - zero point) * scale.

    is_float: FP8 e4m3, else an integer without a sign. bits: of a number. block: rows and columns with one scale; a
    size beyond the matrix: all of them. scales: their dtype, as safetensors names it. has_zero_points: else they are
    half of the range. stays_on_cpu: a CPU holds it so, too.
    """

    is_float: bool
    bits: int
    block: tuple[int, int]
    scales: str
    has_zero_points: bool = False
    stays_on_cpu: bool = True


@runtime_checkable
class QuantizedMatrix(Protocol):
    """A stored tensor whose numbers may stay as they are. form: None: they can't."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def form(self) -> NumberForm | None: ...

    def groups(self) -> NDArray[np.integer[Any]]:
        """Return the group of each column, [columns]. Raises CheckpointError for a group that is not there."""

    def quantized_rows(
        self, begin: int, end: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None]:
        """Return rows as they are stored: numbers, [rows, columns], and for each row and group of columns the scale
        and, where there are any, the zero point, [rows, groups]. Raises CheckpointError for invalid ones."""
