"""Which of a model's matrices stay quantized in memory, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.checkpoint import StoredTensor
from runahead.runtime.checkpoint.quantized.numbers import FLOATS
from runahead.runtime.checkpoint.quantized.scheme import QuantizedMatrix
from runahead.runtime.kernels.quantized_weight import (
    FP8_COLUMNS,
    MADE_GROUP,
    Kind,
    QuantizedWeight,
    experts_stay,
    packed_pairs,
    quantized_bytes,
    quantized_to_fp8,
    quantized_to_int4,
    stays_quantized,
)
from runahead.runtime.models.architecture import TensorStack
from runahead.runtime.rounding import ceil_div

_KINDS: Final[dict[tuple[bool, int], Kind]] = {(True, 8): "fp8", (False, 8): "int8", (False, 4): "int4"}
_SCALE_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ROWS_AT_ONCE: Final = 1024


@dataclass(frozen=True, slots=True)
class Held:
    """How a matrix is held. group: columns that share a scale. device: the type of it. scale_rows: rows of each stored
    tensor with one scale, too. has_zero_points: some of the stored tensors have them. is_made: it is quantized while it
    is loaded. is_ordered: columns are grouped in the order of activations, and stored in the order of their groups.
    of_experts: it is a stack of experts' matrices."""

    kind: Kind
    group: int
    scales: torch.dtype
    device: str
    scale_rows: int = 1
    has_zero_points: bool = False
    is_made: bool = False
    is_ordered: bool = False
    of_experts: bool = False

    def size_bytes(self, outputs: int, depth: int) -> int:
        if self.of_experts:
            return outputs * depth + self.scales.itemsize * outputs // self.scale_rows * ceil_div(depth, self.group)
        return quantized_bytes(
            self.kind,
            outputs,
            depth,
            self.group,
            self.scales.itemsize,
            self.device,
            has_zero_points=self.has_zero_points,
            is_ordered=self.is_ordered,
        )


def held_quantized(
    stack: TensorStack,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    device: str,
    kinds: Collection[Kind],
    quantize: str = "none",
) -> Held | None:
    """Return how the rank's part of a stack of matrices stays quantized; None: it is held in `dtype`. stored: the
    checkpoint's tensors; if the stack is not among them, its weights are random. device: the device's type. kinds: see
    `kinds_that_stay`. quantize: fp8 or int4 has matrices of 16 bits or more become that. Raises CheckpointError for a
    group of columns that is not there."""
    columns = stack.columns[0]
    parts = [stored[name] for name in stack.names if name in stored]
    form: Held | None
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix) and part.form is not None]
    if parts and len(quantized) == len(parts):
        form = _stored_form(quantized, columns, device)
    else:
        form = _made(quantize, columns, device) if all(part.dtype in FLOATS for part in parts) else None
    outputs, depth = stack.own_shape
    if form is None or form.kind not in kinds:
        return None
    if stack.experts:
        return _form_of_experts(form, stack, dtype)
    if not stays_quantized(form.kind, (outputs, depth), form.group, form.scales, dtype, device):
        return None
    is_whole = form.group >= columns
    if stack.inputs is not None and (form.is_ordered or not _has_groups(stack.inputs, form, is_whole)):
        return None
    needs_blocks = form.kind == "fp8" and device != "cpu" and not is_whole
    in_blocks = form.scale_rows % FP8_COLUMNS == 0
    return None if needs_blocks and not (in_blocks and _keeps_blocks(stack)) else form


def _form_of_experts(form: Held, stack: TensorStack, dtype: torch.dtype) -> Held | None:
    """Return how experts hold matrices of the form; None: in `dtype`. Parts of ranks have as many rows and columns with
    one scale as divide the stored blocks and the part's beginning."""
    if form.kind != "fp8":
        return None
    rows, first, group = form.scale_rows, 0, form.group
    for _, piece in stack.pieces():
        rows = math.gcd(rows, first, piece.start)
        first += len(piece)
    if stack.inputs is not None and group < stack.columns[0]:
        group = math.gcd(group, stack.inputs.start)
    if not experts_stay(stack.own_shape[1], group, dtype, form.device):
        return None
    return replace(form, group=group, scales=torch.float32, scale_rows=math.gcd(rows, first), of_experts=True)


def _made(quantize: str, columns: int, device: str) -> Held | None:
    """Return the form of matrices that are quantized while they are loaded. None: they are not."""
    if quantize == "none":
        return None
    kind: Kind = "fp8" if quantize == "fp8" else "int4"
    return Held(kind, columns if kind == "fp8" else MADE_GROUP, torch.bfloat16, device, is_made=True)


def _has_groups(inputs: range, form: Held, is_whole: bool) -> bool:
    """Return whether a rank's columns begin with a group. INT4 that is made while it is loaded needs whole groups, so
    that all ranks hold the same numbers. is_whole: a group is all columns of the model."""
    if form.is_made and form.kind == "int4":
        return not (inputs.start % form.group or len(inputs) % form.group)
    return is_whole or not inputs.start % form.group


def _keeps_blocks(stack: TensorStack) -> bool:
    """Return whether each 128 rows of the product are of one block: each tensor's rows begin with a block, in the
    tensor and in the rank's part, and rows that move stay with their block."""
    first = 0
    for _, piece in stack.pieces():
        if first % FP8_COLUMNS or piece.start % FP8_COLUMNS:
            return False
        first += len(piece)
    blocks = np.concatenate([np.arange(run.start, run.stop) for run in stack.moved or (range(0),)]) // FP8_COLUMNS
    return np.array_equal(blocks, blocks[np.arange(len(blocks)) // FP8_COLUMNS * FP8_COLUMNS])


def _stored_form(parts: Sequence[QuantizedMatrix], columns: int, device: str) -> Held | None:
    """Return how matrices that are stored quantized can be kept together. None: they are quantized in different ways,
    or the device's kernels lack the format or the order of columns."""
    forms = [part.form for part in parts if part.form is not None]
    found = {(form.is_float, form.bits, min(form.block[1], columns)) for form in forms}
    if len(found) > 1 or not all(len(part.shape) == 2 for part in parts):
        return None
    if device == "cpu" and not all(form.stays_on_cpu for form in forms):
        return None
    is_float, bits, group = found.pop()
    is_ordered = not all(map(_is_in_order, parts))
    if is_ordered and (device == "cpu" or bits != 4 or not _have_one_order(parts, columns, group)):
        return None
    dtypes = {_SCALE_DTYPES[form.scales] for form in forms}
    zeros = any(form.has_zero_points for form in forms)
    scales = dtypes.pop() if len(dtypes) == 1 else torch.float32
    scale_rows = math.gcd(*(form.block[0] for form in forms))
    return Held(_KINDS[is_float, bits], group, scales, device, scale_rows, zeros, is_ordered=is_ordered)


def _is_in_order(part: QuantizedMatrix) -> bool:
    """Return whether the groups of columns follow one another."""
    return part.form is not None and np.array_equal(part.groups(), np.arange(part.shape[-1]) // part.form.block[1])


def _have_one_order(parts: Sequence[QuantizedMatrix], columns: int, group: int) -> bool:
    """Return whether the columns of all have the same groups, of equal size."""
    groups = parts[0].groups()
    alike = all(np.array_equal(part.groups(), groups) for part in parts[1:])
    return alike and bool((np.bincount(groups, minlength=columns // group) == group).all())


def read_quantized(
    held: Held, stack: TensorStack, stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> QuantizedWeight:
    """The rank's part of a stack of quantized matrices, on the device. Raises CheckpointError for a scale that is zero
    or not finite, and an FP8 number that is NaN."""
    outputs, columns = stack.own_shape
    numbers = torch.empty((outputs, columns // (2 if held.kind == "int4" else 1)), dtype=torch.uint8, device=device)
    groups: slice | NDArray[np.int64] = slice(None)
    if stack.inputs is not None and held.group < stack.columns[0]:
        first_part = stored[stack.names[0]]
        assert isinstance(first_part, QuantizedMatrix)
        groups = first_part.groups()[stack.inputs.start : stack.inputs.stop : held.group].astype(np.int64)
    inputs: slice | NDArray[np.int64] = slice(None)
    if stack.inputs is not None:
        inputs = slice(stack.inputs.start, stack.inputs.stop)
    order = None
    if held.is_ordered:
        first_part = stored[stack.names[0]]
        assert isinstance(first_part, QuantizedMatrix)
        inputs = np.argsort(first_part.groups(), kind="stable")
        order = torch.from_numpy(inputs).to(device)
    scales, zero_points, first = [], [], 0
    middle = 1 << (3 if held.kind == "int4" else 7)
    for name, rows in stack.pieces():
        tensor = stored[name]
        assert isinstance(tensor, QuantizedMatrix)
        for begin in range(rows.start, rows.stop, _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, rows.stop)
            codes, of_groups, zeros = tensor.quantized_rows(begin, end)
            part = torch.from_numpy(np.array(codes[:, inputs], order="C")).to(device)
            numbers[first : first + len(part)] = packed_pairs(part) if held.kind == "int4" else part
            first += len(part)
            scales.append(np.broadcast_to(of_groups, (len(codes), of_groups.shape[1]))[:, groups])
            zero_points.append(np.full_like(scales[-1], middle) if zeros is None else zeros[:, groups])
    points = np.concatenate(zero_points)
    has_points = held.has_zero_points and bool((points != middle).any())
    return QuantizedWeight(
        held.kind,
        numbers,
        torch.from_numpy(np.concatenate(scales)).to(held.scales).t().contiguous().to(device),
        torch.from_numpy(points.astype(np.uint8)).t().contiguous().to(device) if has_points else None,
        min(held.group, columns),
        dtype,
        order=order,
        scale_rows=held.scale_rows,
    )


def made_quantized(kind: Kind, stack: TensorStack, whole: torch.Tensor) -> QuantizedWeight:
    """The rank's columns of matrices that are quantized while they are loaded. whole: the rank's rows with all of their
    columns, of which each row's scale is made in FP8."""
    if kind == "int4":
        return quantized_to_int4(whole if stack.inputs is None else whole[:, stack.inputs.start : stack.inputs.stop])
    found = quantized_to_fp8(whole)
    if stack.inputs is None:
        return found
    numbers = found.numbers[:, stack.inputs.start : stack.inputs.stop].contiguous()
    return QuantizedWeight("fp8", numbers, found.scales, None, numbers.shape[1], found.dtype)
