"""How weights are quantized, as `quantization_config` describes it, and the interface of matrices that may stay so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Layout = Literal["scaled", "packed", "gptq", "awq"]
WHOLE: Final = 0  # a block that spans the dimension

_PATTERN: Final = "re:"


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


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one kind of layer is quantized.

    layout: which tensors a weight is stored in. scaled: one number a byte, and scales. packed: words of 32 bits of
    compressed-tensors. gptq, awq: words of 32 bits of these two. bits: of a number, 4 or 8. is_float: FP8 e4m3, else an
    integer. block: rows and columns of a weight that share a scale; 0: all of them. has_zero_points: an integer stands
    for its distance to a zero point. zero_point_bias: added to each stored zero point. is_ordered: columns are grouped
    in the order of activations, so that the tensor that gives each its group can't be missing.
    """

    layout: Layout
    bits: int
    is_float: bool
    block: tuple[int, int]
    has_zero_points: bool = False
    zero_point_bias: int = 0
    is_ordered: bool = False

    @property
    def name(self) -> str:
        """Such as `fp8 per-channel` or `int4 groups of 128 with zero points`."""
        rows, columns = self.block
        shared = {
            (1, columns): f"groups of {columns}",
            (1, WHOLE): "per-channel",
            (WHOLE, WHOLE): "per-tensor",
        }.get(self.block, f"{rows}x{columns} blocks")
        zeros = " with zero points" if self.has_zero_points else ""
        return f"{'fp' if self.is_float else 'int'}{self.bits} {shared}{zeros}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What `quantization_config` says. schemes: each with the layers that it is for: names, `re:` and a pattern, or
    the name of a class."""

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]

    def scheme_of(self, module: str) -> Scheme:
        """The scheme of a quantized layer. A name or a pattern counts before the name of a class."""
        for targets, scheme in self.schemes:
            if any(_names(target, module) for target in targets):
                return scheme
        by_class = [scheme for targets, scheme in self.schemes if any(map(_is_class, targets))]
        return by_class[0] if by_class else self.schemes[0][1]


def _is_class(target: str) -> bool:
    """The name of a class, such as Linear, and not of a layer, such as lm_head."""
    return target.isidentifier() and target[:1].isupper()


def _names(target: str, module: str) -> bool:
    if target.startswith(_PATTERN):
        return re.match(target.removeprefix(_PATTERN), module) is not None
    return module == target or module.endswith(f".{target}")
