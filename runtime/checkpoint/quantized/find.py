"""Finds the tensors that make up each quantized weight, by their names, and checks their dtypes and shapes."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.quantized.numbers import FLOATS, item_bytes, mapped
from runahead.runtime.checkpoint.quantized.scheme import WHOLE, Quantization, Scheme
from runahead.runtime.checkpoint.quantized.tensor import ByteCodes, PackedCodes, QuantizedTensor, Scales
from runahead.runtime.checkpoint.refusals import AGAIN
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.rounding import ceil_div

Stored = SafetensorsTensor | QuantizedTensor

_T = TypeVar("_T")

_WEIGHT: Final = ".weight"
_BIAS: Final = ".bias"
_BYTES: Final = ("F8_E4M3", "I8")
_SCALES: Final = ("_scale_inv", "_scale")
# How activations would be quantized, which stay in the dtype that is served, and the KV cache, which may.
_OF_ACTIVATIONS: Final = (
    ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".input_zero_point", ".output_zero_point",
    ".prob_output_scale", ".kv_scale",
)  # fmt: skip
_MARKERS: Final = {"packed": ".weight_packed", "gptq": ".qweight", "awq": ".qweight"}
_PARTS: Final = (
    ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
    ".qweight", ".qzeros", ".scales", ".g_idx",
)  # fmt: skip


def dequantized(stored: Mapping[str, SafetensorsTensor], quantization: Quantization) -> dict[str, Stored]:
    """Return the tensors of an unquantized checkpoint from the files' tensors. A layer's tensors say whether it is
    quantized.

    Raises CheckpointError, naming the tensor, for a part of a weight that is missing, left over, or of another dtype or
    shape than the others ask for.
    """
    left = {name: tensor for name, tensor in stored.items() if not name.endswith(_OF_ACTIVATIONS)}
    found: dict[str, Stored] = {}
    for name in list(left):
        weight = _weight_at(name, left, quantization)
        if name not in left or weight is None:
            continue  # a part of a weight that was found before, or a tensor that is not quantized
        made = weight.scaled(name) if weight.scheme.layout == "scaled" else weight.packed(name)
        if made.name in stored and made.name != name:
            raise CheckpointError(f"tensor {made.name} is there twice: by itself, and quantized in {name}; {AGAIN}")
        found[made.name] = made
        for part in weight.taken:
            del left[part]
    for name, tensor in left.items():
        if tensor.dtype in _BYTES:
            raise CheckpointError(f"tensor {name} is stored as {tensor.dtype} and has no {name}_scale; {AGAIN}")
        if name.endswith(_PARTS):
            raise CheckpointError(
                f"tensor {name} is part of a quantized weight, and what it belongs to is missing or is not quantized "
                f"as quantization_config says; {AGAIN}"
            )
    return {**left, **found}


def of_activations(stored: Mapping[str, SafetensorsTensor]) -> dict[str, SafetensorsTensor]:
    """The tensors that say how activations, keys and values are quantized."""
    return {name: tensor for name, tensor in stored.items() if name.endswith(_OF_ACTIVATIONS)}


def without_empty_biases(stored: Mapping[str, _T], expected: Container[str]) -> dict[str, _T]:
    """The tensors without the biases of zeros that GPTQ's tools give to quantized layers which have none. expected:
    names of the model's tensors. Raises CheckpointError."""
    return {
        name: tensor
        for name, tensor in stored.items()
        if name in expected or not _is_empty_bias(tensor, stored.get(name.removesuffix(_BIAS) + _WEIGHT))
    }


def _is_empty_bias(bias: object, weight: object) -> bool:
    if not isinstance(bias, SafetensorsTensor) or not isinstance(weight, QuantizedTensor):
        return False
    of_rows = bias.name.endswith(_BIAS) and bias.dtype in FLOATS and bias.shape == weight.shape[:1]
    return of_rows and not mapped(bias).any()


def _weight_at(name: str, stored: Mapping[str, SafetensorsTensor], quantization: Quantization) -> _Weight | None:
    """Return the quantized weight whose numbers this tensor holds, or None."""
    module = next((name.removesuffix(end) for end in (_WEIGHT, *_MARKERS.values()) if name.endswith(end)), name)
    scheme = quantization.scheme_of(module)
    marker = _MARKERS.get(scheme.layout)
    is_one = any(name + end in stored for end in _SCALES) if marker is None else name.endswith(marker)
    return _Weight(module, scheme, stored) if is_one else None


@dataclass(slots=True)
class _Weight:
    """One weight. taken: names of its parts."""

    module: str
    scheme: Scheme
    stored: Mapping[str, SafetensorsTensor]
    taken: tuple[str, ...] = ()

    def scaled(self, name: str) -> QuantizedTensor:
        """Return a weight of FP8 or INT8 numbers with its scales. name: of the numbers' tensor, [rows, columns], or a
        stack of such matrices."""
        scheme, weight = self.scheme, self.stored[name]
        self._take(name, ("F8_E4M3",) if scheme.is_float else ("I8",), weight.shape)
        if len(weight.shape) not in (2, 3):
            raise CheckpointError(f"tensor {name} has shape {list(weight.shape)}; a quantized weight has 2 sizes or 3")
        *stack, rows, columns = weight.shape
        block, grid = self._grid(name, rows, columns)
        scale = next(name + end for end in _SCALES if name + end in self.stored)
        shapes = [(*stack, *grid)]
        if grid[1] == 1:
            shapes.append((*stack, grid[0]))
            shapes += [(*stack,)] if grid[0] == 1 else []
        shapes.append((*stack, grid[0], 1, grid[1], 1))  # as ModelOpt exports scales of blocks
        self._take(scale, FLOATS, *shapes)
        zeros = None
        if scheme.has_zero_points:
            zeros = self._take(f"{name}_zero_point", ("I8",), *([grid] if stack else shapes))
        groups = self._groups(f"{name}_g_idx", columns)
        scales = Scales(self.stored[scale], block, grid, "scaled", scheme.bits, zeros, groups)
        return self._made(name, weight.shape, ByteCodes(weight), scales)

    def packed(self, name: str) -> QuantizedTensor:
        """Return a weight of packed INT4 or INT8 numbers with its scales. name: of the tensor of words, int32."""
        scheme, words = self.scheme, self.stored[name]
        if len(words.shape) != 2:
            raise CheckpointError(f"tensor {name} has shape {list(words.shape)}; it must have 2 sizes")
        each = 32 // scheme.bits
        if scheme.layout == "packed":
            rows, columns = words.shape[0], self._columns(words.shape[1] * each)
            packed_shape, scale, zeros, groups = (
                (rows, ceil_div(columns, each)),
                "weight_scale",
                "weight_zero_point",
                "weight_",
            )
        elif scheme.layout == "gptq":
            columns, rows = words.shape[0] * each, words.shape[1]
            packed_shape, scale, zeros, groups = (columns // each, rows), "scales", "qzeros", ""
        else:
            columns, rows = words.shape[0], words.shape[1] * each
            packed_shape, scale, zeros, groups = (columns, rows // each), "scales", "qzeros", ""
        self._take(name, ("I32",), packed_shape)
        block, grid = self._grid(name, rows, columns)
        across = scheme.layout != "packed"
        self._take(f"{self.module}.{scale}", FLOATS, grid[::-1] if across else grid)
        zero_points = None
        if across or scheme.has_zero_points:
            zero_shape = (grid[1], ceil_div(rows, each)) if across else (ceil_div(rows, each), grid[1])
            zero_points = self._take(f"{self.module}.{zeros}", ("I32",), zero_shape)
        group_of = self._groups(f"{self.module}.{groups}g_idx", columns)
        offset = 0 if across else 1 << scheme.bits - 1
        scales = Scales(
            self.stored[f"{self.module}.{scale}"], block, grid, scheme.layout, scheme.bits, zero_points, group_of,
            scheme.zero_point_bias,
        )  # fmt: skip
        codes = PackedCodes(words, scheme.layout, scheme.bits, columns, offset)
        return self._made(self.module + _WEIGHT, (rows, columns), codes, scales)

    def _columns(self, most: int) -> int:
        """Return the columns of a weight of compressed-tensors, whose rows may end inside a word. most: columns that
        fit the words."""
        name = f"{self.module}.weight_shape"
        if name not in self.stored:
            return most
        columns = int(mapped(self._take(name, ("I64", "I32"), (2,)))[1])
        if not most - 32 // self.scheme.bits < columns <= most:
            raise CheckpointError(f"tensor {name} says {columns} columns, and {most} are packed; {AGAIN}")
        return columns

    def _grid(self, name: str, rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The block of rows and columns that share a scale, and how many there are."""
        down, across = self.scheme.block
        down, across = rows if down == WHOLE else down, columns if across == WHOLE else across
        if down == 1 and columns % max(across, 1):
            raise CheckpointError(
                f"tensor {name} holds a weight of {columns} columns, which are no groups of {across}: "
                "quantization_config belongs to another checkpoint"
            )
        down, across = max(down, 1), max(across, 1)
        return (down, across), (ceil_div(rows, down), ceil_div(columns, across))

    def _take(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> SafetensorsTensor:
        """The tensor, which must have one of these dtypes and shapes. Raises CheckpointError."""
        if name not in self.stored:
            raise CheckpointError(f"the quantized weight {self.module} has no tensor {name}; {AGAIN}")
        found = self.stored[name]
        if found.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} is stored as {found.dtype}; of {self.scheme.name} it must be {' or '.join(dtypes)}"
            )
        if found.shape not in shapes:
            raise CheckpointError(
                f"tensor {name} has shape {list(found.shape)}; of {self.scheme.name} it must be "
                f"{' or '.join(str(list(shape)) for shape in shapes)}"
            )
        if found.size_bytes != math.prod(found.shape) * (item_bytes(found.dtype) or 0):
            raise CheckpointError(
                f"tensor {name} spans {found.size_bytes} bytes, which is not what its shape takes; {AGAIN}"
            )
        self.taken = (*self.taken, name)
        return found

    def _groups(self, name: str, columns: int) -> SafetensorsTensor | None:
        """What gives each column its group. Raises CheckpointError where it must be there and is not."""
        return self._take(name, ("I32",), (columns,)) if self.scheme.is_ordered or name in self.stored else None

    def _made(
        self, name: str, shape: tuple[int, ...], codes: ByteCodes | PackedCodes, scales: Scales
    ) -> QuantizedTensor:
        size = sum(self.stored[part].size_bytes for part in self.taken)
        ordered = " in the order of activations" if scales.group_of is not None else ""
        return QuantizedTensor(name, self.scheme.name + ordered, shape, size, codes, scales)
